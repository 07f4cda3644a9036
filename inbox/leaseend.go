package inbox

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/db"
)

// Complete ends leased work with its result and returns what a replay will return. It may be called again after any
// error but ErrLeaseLost, and after it has succeeded: completing twice is completing once. The end of ctx does not keep
// it from being sent.
//
// Not promised: that a second call's result counts (the first one's stays, though each call returns its own), and that an
// error which is not ErrLeaseLost means that nothing was stored.
func Complete[R any](ctx context.Context, lease *Lease, result R) (R, error) {
	stored, err := roundTrip(&result, lease.box.ResultMax)
	if err != nil {
		return result, err
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	start := time.Now()
	before, err := lease.settle(ctx, func() error {
		n, err := lease.sendComplete(ctx, lease.box.pool, stored)
		return rowOrNone(n, err)
	}, statusCompleted)
	if err == nil {
		lease.done()
	}
	if err == nil && before == nil { // else it was completed earlier, and how much earlier is not known here
		lease.fill(ctx, start, stored)
	}
	return result, err
}

// sendComplete takes the message's lock and completes the row, in one round trip.
func (l *Lease) sendComplete(ctx context.Context, on sender, stored []byte) (int64, error) {
	return l.queries(pipe{on: on, before: l.lock()}).InboxComplete(ctx, l.completion(stored))
}

func (l *Lease) lock() []statement {
	return []statement{{l.box.schema.Rewrite(db.InboxTryLock), []any{l.msg.ID.Consumer, l.msg.ID.Message}}}
}

func (l *Lease) completion(stored []byte) db.InboxCompleteParams {
	return db.InboxCompleteParams{Consumer: l.msg.ID.Consumer, MessageID: l.msg.ID.Message, Epoch: l.epoch, Token: l.token, Result: stored}
}

func rowOrNone(n int64, err error) error {
	if err == nil && n == 0 {
		return pgx.ErrNoRows
	}
	return err
}

// settle sends the end of the lease until it is known to be done or lost. The statuses are those that the lease's own
// write leaves, which tell a write whose answer was lost from a lost lease; the row is returned if it was such a one.
func (l *Lease) settle(ctx context.Context, send func() error, own ...string) (*db.InboxHeldRow, error) {
	for wait := newPoll(cleanupTimeout); ; {
		err := l.box.persist(ctx, send)
		if err == nil {
			l.end(errLeaseEnded)
			return nil, nil
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, l.unavailable(err)
		}
		row, err := l.held(ctx, l.box.pool)
		switch {
		case err != nil && !errors.Is(err, pgx.ErrNoRows):
			return nil, l.unavailable(err)
		case err == nil && slices.Contains(own, row.Status):
			l.end(errLeaseEnded)
			return &row, nil
		case err != nil, row.Status != statusPending, !row.Same:
			return nil, l.lost()
		}
		if !wait.next(ctx) { // the row is locked by a transaction that is open
			return nil, l.unavailable(errRowLocked)
		}
	}
}

var errRowLocked = errors.New("another transaction holds the message's row; if it is not the holder's own, it takes the lease over")

// Fail ends leased work that did not succeed, and returns the [*Error] that is given to [Disposition]: failed and when
// it is due again, or dead. A lost lease is ErrLeaseLost. Results of steps stay, so that the next lease goes on behind
// them. The end of ctx does not keep it from being sent. Not promised: that what the work did outside the database is
// undone.
func (l *Lease) Fail(ctx context.Context, cause error) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	cause = sound(cause)
	text, limit := describe(cause), l.box.limitFor(cause)
	var row db.InboxLeaseFailRow
	seen, err := l.settle(ctx, func() (err error) {
		row, err = l.queries(l.box.pool).InboxLeaseFail(ctx, db.InboxLeaseFailParams{
			Consumer: l.msg.ID.Consumer, MessageID: l.msg.ID.Message, Epoch: l.epoch, Token: l.token, LastError: text,
			MaxAttempts: limit, BackoffBase: l.box.BackoffBase.Seconds(), BackoffMax: l.box.BackoffMax.Seconds(),
		})
		return err
	}, statusFailed, statusDead)
	if err != nil {
		return err
	}
	if seen != nil {
		row.Status, row.DueIn, row.PayloadKept = seen.Status, seen.DueIn, seen.PayloadKept
	}
	v := verdict{outcome: Failed, attempt: l.attempt, after: seconds(row.DueIn), err: cause, seen: &l.epoch}
	if row.Status == statusDead {
		v.outcome, v.payloadKept = Dead, row.PayloadKept
	}
	return v.asError(l.msg.ID)
}

// Release gives the lease back without a result: the message is due at once and the attempt is not counted. It is for a
// process that stops. A lease that is lost or ended is released already. Not promised: that the work did not begin, or
// that somebody goes on with it: that is a redelivery's or [Resume]'s part.
func (l *Lease) Release(ctx context.Context) error {
	if l.ctx.Err() != nil {
		return nil
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	n, err := l.queries(l.box.pool).InboxRelease(ctx, db.InboxReleaseParams{
		Consumer: l.msg.ID.Consumer, MessageID: l.msg.ID.Message, Epoch: l.epoch, Token: l.token,
	})
	l.end(errLeaseEnded)
	if err != nil {
		return l.unavailable(err)
	}
	if n == 0 {
		return l.lost()
	}
	return nil
}
