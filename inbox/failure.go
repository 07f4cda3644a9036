package inbox

import (
	"context"
	"errors"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// lockWait bounds how long a failure record waits for a copy that is running.
const lockWait = 2 * time.Second

var errLeased = errors.New("lease mode began it and only lease mode can go on with it: the consumer changed its mode with leases open")

// anyEpoch records a failure whatever the row's epoch is.
const anyEpoch = -1

// RecordFailure counts a failed attempt of a caller of [Handle] who rolled its transaction back, which is also what
// removes the record that Handle makes in it. err is what failed: the error of Handle, of the business code around it
// or of COMMIT. Call it after the rollback, in no transaction: it runs in one of its own on the box's pool, with a bound
// of its own that the end of ctx does not shorten.
//
// It returns what is to be given to [Disposition]: an [*Error] with the state after the record, or nil if another
// worker has completed the message meanwhile. An error that is no failure of the handler (in progress, not due, the
// store's state) is returned as it is and nothing is recorded. A row that was requeued or decided after the attempt
// began is left alone, and so is one that has the failure already, because Handle's transaction was committed after all.
//
// Not promised: a count of attempts that ended with their process. Whoever dies between the rollback and this call
// leaves no trace; Message.Delivery is the second limit for these. An err that is not Handle's own says nothing about
// the row that the attempt saw, and is counted against whatever row there is: call it once for each failure.
func RecordFailure(ctx context.Context, box *Box, msg Message, err error) error {
	if err == nil {
		return &commitbox.InputError{Field: "err", Problem: "is nil"}
	}
	if bad := errors.Join(box.check(), msg.check()); bad != nil {
		return bad
	}
	box, over := box.under(msg.ID.Consumer)
	defer over()
	err = sound(err)
	if box.policy != nil && box.policy.Mode == ModeOff {
		return box.unrecorded(&msg, err).asError(msg.ID)
	}
	epoch := int64(anyEpoch)
	var e *Error
	if errors.As(err, &e) && e.ID == msg.ID {
		if e.seen == nil || endedTx(e, msg.ID) {
			return err
		}
		epoch, err = *e.seen, e.Err
	}
	if transient(err) {
		return unavailable(err).asError(msg.ID)
	}
	return box.afterFailure(ctx, &msg, epoch, err).asError(msg.ID)
}

func (b *Box) check() error {
	if b == nil {
		return &commitbox.InputError{Field: "box", Problem: "is nil"}
	}
	return nil
}

// limitFor is the number of attempts that a message has after failing with cause. A panic of Config.IsPermanent is
// logged and says nothing about the message.
func (s *settings) limitFor(cause error) (limit int32) {
	var marked *permanentError
	if errors.As(cause, &marked) || errors.Is(cause, errDeliveries) {
		return 1
	}
	defer func() {
		if recover() != nil {
			s.Logger.Error("inbox: Config.IsPermanent panicked; the failure counts as one attempt", "stack", string(debug.Stack()))
			limit = int32(s.MaxAttempts)
		}
	}()
	if s.IsPermanent(cause) {
		return 1
	}
	return int32(s.MaxAttempts)
}

// afterFailure records a failure after its transaction was rolled back and says what the message's state is now.
func (b *Box) afterFailure(ctx context.Context, m *Message, epoch int64, cause error) verdict {
	ctx, cancel := detached(ctx)
	defer cancel()
	row, err := b.record(ctx, m, epoch, cause)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return b.answerFromRow(ctx, m, cause)
	case sqlState(err) == stateLockTimeout:
		return verdict{outcome: InProgress, err: cause}
	case err != nil:
		return unavailable(errors.Join(cause, err))
	}
	return failureVerdict(row, epoch, cause)
}

func failureVerdict(row db.InboxRecordFailureRow, epoch int64, cause error) verdict {
	v := verdict{outcome: Failed, attempt: int(row.Attempts), after: seconds(row.DueIn), err: cause, seen: &epoch}
	if row.Status == statusDead {
		v.outcome, v.payloadKept = Dead, row.PayloadKept
	}
	return v
}

// record sends [begin, lock_timeout, lock, record, commit] in one round trip.
func (b *Box) record(ctx context.Context, m *Message, epoch int64, cause error) (row db.InboxRecordFailureRow, err error) {
	err = b.guarded(ctx, m.ID, func(p pipe) error {
		row, err = b.recordFailure(ctx, p, m, epoch, cause)
		return err
	})
	return row, err
}

// guarded runs one statement in a short transaction of its own, under the message's lock, and waits for that at most
// lockWait.
func (b *Box) guarded(ctx context.Context, id ID, run func(pipe) error) error {
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	var tx pgx.Tx
	err = run(pipe{on: conn.Conn(), begin: &tx, after: schema.Commit, before: []statement{
		{b.schema.Rewrite(db.LockTimeout), []any{strconv.FormatInt(lockWait.Milliseconds(), 10)}},
		{b.schema.Rewrite(db.InboxLock), []any{id.Consumer, id.Message}},
	}})
	if err != nil && tx != nil && stateOf(conn.Conn()) == stateAborted {
		_ = tx.Rollback(ctx) // if it fails, the connection is not used again
	}
	return err
}

// answerFromRow is the verdict of a failure that was not recorded, because the row has changed since.
func (b *Box) answerFromRow(ctx context.Context, m *Message, cause error) verdict {
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return unavailable(errors.Join(cause, err))
	}
	defer conn.Release()
	row, err := b.look(ctx, pipe{on: conn.Conn()}, m.ID)
	if err != nil {
		return unavailable(errors.Join(cause, err))
	}
	v, next := b.decide(row, m.Fingerprint)
	if next != stepAnswer {
		v.outcome = Unavailable // runnable again, by somebody's requeue
	}
	if v.outcome != Replayed {
		v.err = cause
	}
	return v
}

// afterLimit makes a row dead that has used up its attempts.
func (b *Box) afterLimit(ctx context.Context, m *Message, epoch int64) verdict {
	ctx, cancel := detached(ctx)
	defer cancel()
	var row db.InboxBuryRow
	err := b.guarded(ctx, m.ID, func(p pipe) (err error) {
		row, err = b.bury(ctx, p, m, epoch)
		return err
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows), sqlState(err) == stateLockTimeout:
		return verdict{outcome: InProgress}
	case err != nil:
		return unavailable(err)
	}
	return verdict{outcome: Dead, attempt: int(row.Attempts), payloadKept: row.PayloadKept, seen: &epoch}
}
