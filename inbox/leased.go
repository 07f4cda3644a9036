package inbox

import (
	"context"
	"errors"
	"time"
)

// ProcessLeased runs fn once for the message under a lease, for work that leaves the database: it acquires, runs, and
// completes with fn's result, or fails, or, if the store or the caller is what failed, releases. fn uses [Step] for
// parts that must not be repeated, and may end the lease itself with [CompleteIn] or [Complete], whose result is then
// what a replay returns, and whose success an error of fn does not change. fn's ctx ends when the lease is lost.
//
// The errors are those of [Process]; every started lease counts as an attempt, except a released one. Not promised:
// that fn runs once. It runs again after a crash, which is what steps are for.
func ProcessLeased[R any](ctx context.Context, box *Box, msg Message, fn func(ctx context.Context, lease *Lease) (R, error)) (Result[R], error) {
	start := time.Now()
	if err := checkProcess(box, &msg, fn == nil); err != nil {
		return Result[R]{Outcome: Failed}, err
	}
	box, over := box.under(msg.ID.Consumer)
	defer over()
	lease, v := box.acquire(ctx, msg)
	if lease == nil {
		return answer(ctx, &box.settings, msg.ID, v, *new(R), start)
	}
	value, v := underLease(ctx, lease, fn)
	return answer(ctx, &box.settings, msg.ID, v, value, start)
}

// underLease runs fn and ends the lease, whichever way fn ends.
func underLease[R any](ctx context.Context, lease *Lease, fn func(context.Context, *Lease) (R, error)) (value R, v verdict) {
	defer lease.end(errLeaseEnded) // what could not be ended at the store runs out
	returned := false
	defer func() {
		if !returned { // runtime.Goexit: nobody waits for the answer
			_ = lease.Fail(ctx, errGoexit)
		}
	}()
	bound, cancel := lease.Bind(ctx)
	defer cancel()
	_, err := recovered(func() (_ []byte, err error) {
		value, err = fn(bound, lease)
		if err == nil && !lease.completed.Load() {
			value, err = Complete(ctx, lease, value)
		}
		return nil, err
	})
	returned = true
	if err != nil {
		return value, lease.giveUp(ctx, err)
	}
	return value, verdict{outcome: Executed, attempt: lease.attempt}
}

// giveUp ends the lease of work that did not succeed.
func (l *Lease) giveUp(ctx context.Context, cause error) verdict {
	v := verdict{outcome: Unavailable, attempt: l.attempt, err: cause}
	var e *Error
	switch {
	case errors.Is(cause, ErrTxEnded): // a person has to look, and the row stays as it is
		v.outcome, v.seen = Failed, &l.epoch
	case l.completed.Load(): // and then fn failed
		v.outcome = Executed
	case errors.Is(cause, ErrLeaseLost):
		l.end(ErrLeaseLost)
		v.outcome = InProgress
	case errors.As(cause, &e) && e.ID == l.msg.ID && e.Outcome == Unknown:
		v.outcome = Unknown // it may be completed
	case transient(cause), errors.Is(cause, ErrUnavailable), errors.Is(ctx.Err(), context.Canceled):
		if err := l.Release(ctx); err != nil {
			v.err = errors.Join(cause, err)
		}
	default:
		v = l.failed(ctx, cause)
	}
	return v
}

// failed records the failure and returns its verdict.
func (l *Lease) failed(ctx context.Context, cause error) verdict {
	err := l.Fail(ctx, cause)
	var e *Error
	if !errors.As(err, &e) {
		return unavailable(err)
	}
	return verdict{outcome: e.Outcome, attempt: e.Attempt, after: e.RetryAfter, payloadKept: e.PayloadKept, err: e.Err, seen: e.seen}
}
