package inbox

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
)

// verdict is an answer before it has a type.
type verdict struct {
	outcome     Outcome
	attempt     int
	result      []byte // what a replay returns
	after       time.Duration
	payloadKept bool
	err         error
	seen        *int64 // the epoch that a failed attempt saw; nil: it did not run
	lost        bool   // COMMIT was sent and its answer did not come
	by          DecidedBy
	copy        *rowCopy // of a replay, if it may be cached
	away        bool     // no answer: the cache in front failed, and is left alone for the rest of the call
}

// rowCopy is a completed row that others can see.
type rowCopy struct {
	CacheEntry
	age time.Duration
}

// unavailable is the verdict where the store failed. A transaction that has ended is the caller's mistake.
func unavailable(err error) verdict { return verdict{outcome: Unavailable, err: err} }

func (v verdict) asError(id ID) error {
	var input *commitbox.InputError
	switch {
	case v.outcome == Executed || v.outcome == Replayed:
		return nil
	case v.outcome == Unavailable && errors.Is(v.err, pgx.ErrTxClosed) && errors.As(v.err, &input):
		return v.err
	}
	return &Error{ID: id, Outcome: v.outcome, RetryAfter: v.after, Attempt: v.attempt, PayloadKept: v.payloadKept, Err: v.err, seen: v.seen}
}

// answer makes the typed result of a verdict. value is what the handler of this call returned.
func answer[R any](ctx context.Context, s *settings, id ID, v verdict, value R, start time.Time) (Result[R], error) {
	s.report(ctx, id, v, start)
	result := Result[R]{Outcome: v.outcome, Attempt: v.attempt, DecidedBy: v.by}
	switch v.outcome {
	case Executed:
		result.Value = value
	case Replayed:
		result.Replayed = true
		stored, err := decode[R](v.result)
		if err != nil {
			return result, &Error{ID: id, Outcome: Replayed, Attempt: v.attempt, Err: err}
		}
		result.Value = stored
	}
	return result, v.asError(id)
}

// report measures a verdict and logs what an operator should see.
func (s *settings) report(ctx context.Context, id ID, v verdict, start time.Time) {
	outcome := v.outcome.String()
	s.Observer.Observe(commitbox.InboxHandled, 1, id.Consumer, outcome, v.by.String())
	s.Observer.Observe(commitbox.InboxSeconds, time.Since(start).Seconds(), id.Consumer, outcome)
	var panicked *PanicError
	switch {
	case errors.As(v.err, &panicked):
		s.Logger.ErrorContext(ctx, "inbox: the handler panicked", v.attrs(id, "stack", string(panicked.Stack))...)
	case endedTx(v.err, id):
		s.Logger.ErrorContext(ctx, "inbox: the handler ended its transaction; look at what it committed", v.attrs(id)...)
	case v.outcome == Unknown:
		s.Logger.WarnContext(ctx, "inbox: the answer to COMMIT was lost; the next delivery finds out", v.attrs(id)...)
	case v.outcome == Dead && v.seen != nil, v.outcome == Mismatch:
		s.Logger.WarnContext(ctx, "inbox: a message needs a person", v.attrs(id, "payload_kept", v.payloadKept)...)
	}
}

// attrs are what a log line says of a verdict.
func (v *verdict) attrs(id ID, more ...any) []any {
	return append([]any{"consumer", id.Consumer, "message_id", id.Message, "outcome", v.outcome.String(), "attempt", v.attempt}, more...)
}
