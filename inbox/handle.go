package inbox

import (
	"context"
	"database/sql/driver"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// Option changes one call of [Handle].
type Option func(*handling)

// NoSavepoint saves one round trip. A failure can then not be recorded in the transaction, and the transaction is made
// unusable, so that the handler's partial writes cannot be committed. Not promised: a handler that rolls back to a
// savepoint of the caller's, from before Handle, takes the message's row away, and what it writes afterwards can be
// committed without it. With a result, or with the savepoint of Handle, that is a failure.
func NoSavepoint() Option { return func(h *handling) { h.savepoint = false } }

// WithFingerprint sets what Message.Fingerprint is for [Process]. Not promised: a comparison where the row has none or
// one of another algorithm.
func WithFingerprint(fingerprint []byte) Option {
	return func(h *handling) { h.msg.Fingerprint = fingerprint }
}

// Using takes the settings of a box instead of the defaults. Its pool is not used. Not promised: that tx is in the box's
// database, which nobody checks; and what only [Process] does: to run again after a conflict, and to find out what became
// of a COMMIT.
func Using(box *Box) Option {
	return func(h *handling) {
		if box != nil {
			h.box, h.settings = box, &box.settings
		}
	}
}

// Handle runs fn once for the message, in the caller's transaction: the message counts as handled if the caller
// commits. Its writes go into tx, which the caller's closure holds.
//
// What the error says:
//
//   - nil: fn ran, or had run before and its result is returned. Commit, then ack.
//   - ErrFailed, ErrDead: fn failed. Its writes are undone to the savepoint that Handle had set, and the failure is
//     recorded in tx: commit it. If tx is rolled back instead, the record goes with it; call [RecordFailure] then.
//   - ErrInProgress, ErrNotDue, ErrPayloadMismatch, or ErrDead from before: fn did not run and nothing was written.
//   - ErrUnavailable: the store failed; roll back and deliver again.
//   - an [*commitbox.InputError]: an argument was refused before anything was sent; tx is as it was.
//
// Where the end of fn cannot be recorded, tx is made unusable, so that the only way on is to roll back: the row is never
// left completed by a handler that did not succeed. That holds for a panic and runtime.Goexit too, which go on to the
// caller. An ended ctx does not keep the failure from being recorded, and a cancelled one counts as any other failure:
// what becomes of the record is the caller's decision, who commits or rolls back. Cancelled in the middle of a statement,
// which closes the connection, it is ErrUnavailable.
//
// Handle works at every isolation level. Under REPEATABLE READ and SERIALIZABLE it may answer with a serialization
// failure (see [Retryable]). It takes at most two round trips of its own, one with [NoSavepoint] and no result, two for a
// duplicate, which writes nothing. Not promised: what fn does outside tx, and a tx used by two goroutines at a time.
func Handle[R any](ctx context.Context, tx pgx.Tx, id ID, fn func(ctx context.Context) (R, error), opts ...Option) (Result[R], error) {
	start := time.Now()
	h := handling{settings: standard, msg: Message{ID: id}, tx: tx, savepoint: true}
	for _, option := range opts {
		option(&h)
	}
	if err := h.check(ctx, fn == nil); err != nil {
		return Result[R]{Outcome: Failed}, err
	}
	defer h.under()()
	var value R
	v := h.byMode(ctx, func(ctx context.Context) (stored []byte, err error) {
		value, err = fn(ctx)
		if err != nil {
			return nil, sound(err)
		}
		return roundTrip(&value, h.ResultMax)
	})
	return answer(ctx, h.settings, id, v, value, start)
}

// roundTrip returns the stored form of a value and replaces the value by what a replay will return.
func roundTrip[R any](value *R, limit int) ([]byte, error) {
	stored, err := encode(*value, limit)
	if err != nil || stored == nil {
		return nil, err
	}
	*value, err = decode[R](stored)
	return stored, err
}

// handling is one call of Handle.
type handling struct {
	*settings
	box       *Box // of Using; nil: none
	msg       Message
	tx        pgx.Tx
	savepoint bool
	bare      bool // there is no row
}

func (h *handling) check(ctx context.Context, noHandler bool) error {
	err := errors.Join(check.Tx(ctx, h.tx), h.msg.check())
	if noHandler {
		err = errors.Join(err, &commitbox.InputError{Field: "fn", Problem: "is nil"})
	}
	return err
}

func (h *handling) handle(ctx context.Context, run func(context.Context) ([]byte, error)) verdict {
	scope := scopeOf(h.tx)
	if h.isNested(ctx, h.msg.ID, scope) {
		return verdict{outcome: InProgress, err: ErrNested}
	}
	got, v := h.waitForClaim(ctx)
	if got == nil {
		return v
	}
	ctx, leave := h.enter(ctx, []ID{h.msg.ID}, scope)
	defer leave()
	return h.run(ctx, got, run)
}

// isEnded asks pgx, without a round trip, whether a transaction was committed or rolled back through it.
func isEnded(ctx context.Context, tx pgx.Tx) bool {
	return errors.Is(tx.SendBatch(ctx, new(pgx.Batch)).Close(), pgx.ErrTxClosed)
}

// waitForClaim claims until Config.Wait has passed.
func (h *handling) waitForClaim(ctx context.Context) (*claim, verdict) {
	if h.bare {
		return h.claimNothing(ctx)
	}
	for wait := newPoll(h.Wait); ; {
		got, v, rereads := h.claim(ctx)
		if got != nil || v.outcome != InProgress || !rereads || !wait.next(ctx) {
			return got, v
		}
	}
}

// claim returns the right to run, or the answer and whether this transaction can see a later one.
func (h *handling) claim(ctx context.Context) (_ *claim, v verdict, rereads bool) {
	p := pipe{on: h.tx}
	if h.savepoint {
		p.after = schema.Savepoint
	}
	got, err := h.settings.claim(ctx, p, &h.msg)
	for range claimsMax {
		if err == nil {
			return &got, verdict{}, false
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return nil, unavailable(err), false
		}
		row, err2 := h.look(ctx)
		if err2 != nil {
			return nil, unavailable(err2), false
		}
		v, next := h.decide(row, h.msg.Fingerprint)
		switch next {
		case stepAnswer:
			return nil, v, row.Rereads
		case stepBury:
			return nil, h.buryHere(ctx, row), false
		case stepTakeover:
			got, err = h.takeover(ctx, p, &h.msg, row.Epoch)
		default:
			if !row.Rereads {
				return nil, unavailable(errSnapshot), false
			}
			got, err = h.settings.claim(ctx, p, &h.msg)
		}
	}
	if err == nil {
		return &got, verdict{}, false
	}
	return nil, verdict{outcome: InProgress}, true
}

var errSnapshot = errors.New("the row changed after this transaction's snapshot was taken; begin a new transaction")

// look reads the row and gives the savepoint of the claim back.
func (h *handling) look(ctx context.Context) (db.InboxLookRow, error) {
	p := pipe{on: h.tx}
	if h.savepoint {
		p.before = []statement{{sql: schema.ReleaseSavepoint}}
	}
	return h.settings.look(ctx, p, h.msg.ID)
}

func (h *handling) buryHere(ctx context.Context, row db.InboxLookRow) verdict {
	buried, err := h.bury(ctx, pipe{on: h.tx}, &h.msg, row.Epoch)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return verdict{outcome: InProgress}
	case err != nil:
		return unavailable(err)
	}
	return verdict{outcome: Dead, attempt: int(buried.Attempts), payloadKept: buried.PayloadKept}
}

// run calls the handler and settles its end, whichever way it ends. If even that unwinds (a tracer or a transaction of
// the caller's may panic), the transaction is made unusable.
func (h *handling) run(ctx context.Context, got *claim, run func(context.Context) ([]byte, error)) (v verdict) {
	settled := false
	defer func() {
		if !settled {
			ctx, cancel := detached(ctx)
			defer cancel()
			h.spoil(ctx)
		}
	}()
	returned := false
	defer func() {
		if !returned {
			h.undo(ctx, got, errUnwound)
			settled = true
		}
	}()
	stored, err := run(ctx)
	returned = true
	if err == nil {
		err = h.finish(ctx, stored)
	}
	v = verdict{outcome: Executed, attempt: got.attempt}
	if err != nil {
		v = h.undo(ctx, got, err)
	}
	settled = true
	return v
}

var errUnwound = errors.New("the handler panicked or ended its goroutine")

// finish stores the result and releases the savepoint, in one round trip. With nothing to send, it looks at what
// PostgreSQL has said last.
func (h *handling) finish(ctx context.Context, stored []byte) error {
	if err := h.state(ctx); err != nil {
		return err
	}
	p := pipe{on: h.tx}
	if h.savepoint {
		p.after = schema.ReleaseSavepoint
	}
	switch {
	case stored != nil && !h.bare:
		return h.keepResult(ctx, p, stored)
	case h.savepoint:
		_, err := h.tx.Exec(ctx, schema.ReleaseSavepoint)
		return err
	}
	return nil
}

func (h *handling) keepResult(ctx context.Context, p pipe, stored []byte) error {
	n, err := h.storeResult(ctx, p, h.msg.ID, stored)
	if err == nil && n == 0 {
		err = errRowGone
	}
	return err
}

var errRowGone = errors.New("the handler rolled back to a savepoint from before it was called, or removed the message's row")

// state says what the handler did to the transaction, as far as it can be seen without a round trip.
func (h *handling) state(ctx context.Context) error {
	if isEnded(ctx, h.tx) {
		return ErrTxEnded
	}
	switch stateOf(h.tx.Conn()) {
	case stateIdle:
		return ErrTxEnded
	case stateAborted:
		return errAborted
	case stateBusy:
		return errRowsOpen
	}
	return nil
}

// undo takes the handler's writes back and records its failure. Where that is not confirmed, it makes the transaction
// unusable.
func (h *handling) undo(handlerCtx context.Context, got *claim, cause error) verdict {
	ctx, cancel := detached(handlerCtx)
	defer cancel()
	v := verdict{outcome: Failed, attempt: got.attempt, err: cause, seen: &got.seen}
	state := stateOf(h.tx.Conn())
	if errors.Is(h.state(ctx), ErrTxEnded) {
		switch {
		case state == stateUnseen && handlerCtx.Err() != nil: // database/sql has rolled back when the context ended
			if v.err = handlerCtx.Err(); !endedTx(cause, h.msg.ID) {
				v.err = cause
			}
			if errors.Is(handlerCtx.Err(), context.Canceled) {
				return unavailable(v.err)
			}
		case !endedTx(cause, h.msg.ID):
			v.err = errors.Join(ErrTxEnded, cause)
		}
		return v
	}
	if uncounted(handlerCtx, state, cause) {
		h.spoil(ctx)
		return unavailable(cause)
	}
	row, err := h.mark(ctx, cause)
	if err != nil {
		if lost := h.spoil(ctx); lost && uncounted(handlerCtx, stateClosed, cause) {
			return unavailable(cause)
		}
		if h.savepoint {
			v.err = errors.Join(cause, err)
		}
		return v
	}
	v.attempt, v.after = int(row.Attempts), seconds(row.DueIn)
	if row.Status == statusDead {
		v.outcome, v.payloadKept = Dead, row.PayloadKept
	}
	return v
}

// mark records the failure behind the savepoint, and fails without one.
func (h *handling) mark(ctx context.Context, cause error) (db.InboxFailHereRow, error) {
	if !h.savepoint {
		return db.InboxFailHereRow{}, errNoSavepoint
	}
	// Alone, because in an aborted transaction pgx cannot prepare what would travel with it.
	if _, err := h.tx.Exec(ctx, schema.RollbackSavepoint); err != nil {
		return db.InboxFailHereRow{}, err
	}
	if h.bare {
		_, err := h.tx.Exec(ctx, schema.ReleaseSavepoint)
		return db.InboxFailHereRow{Status: statusFailed, DueIn: h.BackoffBase.Seconds()}, err
	}
	return h.failHere(ctx, pipe{on: h.tx, before: []statement{{sql: schema.ReleaseSavepoint}}}, h.msg.ID, cause)
}

var errNoSavepoint = errors.New("there is no savepoint")

// spoil makes the transaction unusable by a statement that fails. Where that cannot be sent, because rows are open, the
// connection is closed, or if it is not seen, the transaction rolled back. It says whether a connection that is not seen
// turned out to be of no use.
func (h *handling) spoil(ctx context.Context) (lost bool) {
	_, err := h.tx.Exec(ctx, schema.Spoil)
	conn := h.tx.Conn()
	switch stateOf(conn) {
	case stateOpen, stateBusy:
		_ = conn.Close(ctx) // whatever it answers, the connection is not used again
	case stateUnseen:
		if sqlState(err) != "" {
			return false
		}
		_ = h.tx.Rollback(ctx) // whatever it answers, what counts is whether there is a transaction
		if !isEnded(ctx, h.tx) {
			h.Logger.ErrorContext(ctx, "inbox: the transaction could not be made unusable", "consumer", h.msg.ID.Consumer, "message_id", h.msg.ID.Message)
		}
		return errors.Is(err, driver.ErrBadConn)
	}
	return false
}
