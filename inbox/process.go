package inbox

import (
	"context"
	"errors"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/schema"
)

// conflictsMax bounds how often one call runs its transaction again after a serialization failure or a deadlock.
const conflictsMax = 5

// Process runs fn once for the message, in a READ COMMITTED transaction of its own on the box's pool, and commits it
// with the message's row.
//
// What the error says, and what [Disposition] does with it:
//
//   - nil: fn ran and is committed, or had been before and its result is returned
//   - ErrFailed, ErrDead: fn failed; its writes are rolled back and the failure is recorded. A panic is a failure
//     ([*PanicError]). A dead row keeps the message's payload
//   - ErrInProgress, ErrNotDue, ErrPayloadMismatch, or ErrDead from before: fn did not run
//   - ErrUnavailable: the store failed, the transaction kept losing against others, or ctx was cancelled; nothing is
//     recorded and no attempt counted
//   - ErrOutcomeUnknown: the answer to COMMIT was lost and could not be found out within Config.CommitWait. Deliver the
//     message again; the next call finds it out
//   - an [*commitbox.InputError]: an argument was refused before anything was sent
//
// fn may be called more than once: after a serialization failure or a deadlock (up to six times), and after a lost
// COMMIT that turns out to have been rolled back. All but the last run are rolled back. Commit and Rollback of the
// transaction that fn gets answer ErrTxOwned; savepoints (Begin) work. After fn has returned it and its savepoints answer
// pgx.ErrTxClosed; its Conn and its LargeObjects cannot be taken back and must not be used any more. If fn ends the
// transaction in another way, the error is ErrTxEnded. COMMIT is sent even if ctx ends while fn returns.
//
// Copies of a message that are given to one box at the same time ask the database once, and share its answer.
//
// Not promised: an end of fn. Give ctx a deadline; one that passes counts as a failure, a cancelled ctx does not.
// Without a result, Process adds no round trip to the transaction; a result travels with COMMIT.
func Process[R any](ctx context.Context, box *Box, msg Message, fn func(ctx context.Context, tx pgx.Tx) (R, error)) (Result[R], error) {
	start := time.Now()
	if err := checkProcess(box, &msg, fn == nil); err != nil {
		return Result[R]{Outcome: Failed}, err
	}
	box, over := box.under(msg.ID.Consumer)
	defer over()
	var value R
	v := box.byMode(ctx, &msg, func(ctx context.Context, tx pgx.Tx) (stored []byte, err error) {
		value, err = fn(ctx, tx)
		if err != nil {
			return nil, err
		}
		return roundTrip(&value, box.ResultMax)
	})
	return answer(ctx, &box.settings, msg.ID, v, value, start)
}

func checkProcess(box *Box, msg *Message, noHandler bool) error {
	err := errors.Join(box.check(), msg.check())
	if noHandler {
		err = errors.Join(err, &commitbox.InputError{Field: "fn", Problem: "is nil"})
	}
	return err
}

// handler runs the user's function and returns the stored form of its result.
type handler func(ctx context.Context, tx pgx.Tx) ([]byte, error)

// process runs attempts until one has an answer.
func (b *Box) process(ctx context.Context, m *Message, run handler) verdict {
	if b.isNested(ctx, m.ID, b.pool) {
		return verdict{outcome: InProgress, err: ErrNested}
	}
	wait, conflicts, over := newPoll(b.Wait), 0, m.Delivery > b.MaxDeliveries
	for {
		var v verdict
		if over {
			v, over = b.overdelivered(ctx, m)
		}
		if !over {
			v = b.attempt(ctx, ctx, m, run)
		}
		switch {
		case v.lost:
			return b.findOut(ctx, m, run, v.err)
		case v.outcome == Unavailable && conflict(v.err) && conflicts < conflictsMax:
			b.Observer.Observe(commitbox.InboxRetries, 1, m.ID.Consumer)
			if !sleep(ctx, jitter(pollFirst<<conflicts)) {
				return v
			}
			conflicts++
		case v.outcome != InProgress || !wait.next(ctx):
			return v
		}
	}
}

// findOut claims a message again whose COMMIT was sent and not answered. A committed one is replayed; one that was
// rolled back runs again; while the old transaction is open, its lock says so, and the outcome stays unknown.
func (b *Box) findOut(ctx context.Context, m *Message, run handler, cause error) verdict {
	for wait := newPoll(b.CommitWait); wait.next(ctx); {
		v := b.ask(ctx, m, run)
		if !v.lost && v.outcome != InProgress && v.outcome != Unavailable {
			return v
		}
	}
	return verdict{outcome: Unknown, err: cause}
}

// ask is an attempt that is given up if its claim is not answered: the network that lost COMMIT may be silent still.
func (b *Box) ask(ctx context.Context, m *Message, run handler) verdict {
	claiming, cancel := context.WithTimeout(ctx, cleanupTimeout)
	defer cancel()
	return b.attempt(claiming, ctx, m, run)
}

// attempt runs one transaction. The first context is for what is sent before the handler.
func (b *Box) attempt(claiming, ctx context.Context, m *Message, run handler) verdict {
	conn, err := b.pool.Acquire(claiming)
	if err != nil {
		return unavailable(err)
	}
	defer conn.Release()
	tx, got, v := b.open(claiming, conn, m)
	if got == nil {
		return v
	}
	w := &work{box: b, msg: m, conn: conn, tx: tx, claim: *got}
	return w.run(ctx, run)
}

// open claims the message in a new transaction, which is left open only with a claim.
func (b *Box) open(ctx context.Context, conn *pgxpool.Conn, m *Message) (pgx.Tx, *claim, verdict) {
	takeover, epoch := false, int64(0)
	for range claimsMax {
		var tx pgx.Tx
		var got claim
		var err error
		p := pipe{on: conn.Conn(), begin: &tx}
		if takeover {
			got, err = b.takeover(ctx, p, m, epoch)
		} else {
			got, err = b.claim(ctx, p, m)
		}
		if err == nil {
			return tx, &got, verdict{}
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			rollback(ctx, conn.Conn())
			return nil, nil, unavailable(err)
		}
		row, err := b.look(ctx, pipe{on: conn.Conn(), after: schema.Rollback}, m.ID)
		if err != nil {
			rollback(ctx, conn.Conn())
			return nil, nil, unavailable(err)
		}
		v, next := b.decide(row, m.Fingerprint)
		switch next {
		case stepAnswer:
			return nil, nil, v
		case stepBury:
			conn.Release() // the record takes a connection of its own
			return nil, nil, b.afterLimit(ctx, m, row.Epoch)
		}
		takeover, epoch = next == stepTakeover, row.Epoch
	}
	return nil, nil, verdict{outcome: InProgress}
}

// rollback ends a transaction of the library's own. If it fails, the pool closes the connection.
func rollback(ctx context.Context, conn *pgx.Conn) {
	if state := stateOf(conn); state == stateOpen || state == stateAborted {
		ctx, cancel := detached(ctx)
		defer cancel()
		_, _ = conn.Exec(ctx, schema.Rollback)
	}
}

// work is a claimed message on its way through one transaction.
type work struct {
	box  *Box
	msg  *Message
	conn *pgxpool.Conn
	tx   pgx.Tx
	bare bool // there is no row
	claim
}

// run calls the handler and ends the transaction, whichever way the handler ends.
func (w *work) run(ctx context.Context, run handler) verdict {
	owned := &ownedTx{tx: w.tx}
	ended := false
	defer func() {
		if !ended { // runtime.Goexit: nobody waits for the answer
			owned.ended.Store(true)
			w.fail(ctx, errGoexit)
		}
	}()
	stored, err := recovered(func() ([]byte, error) {
		ctx, leave := w.box.enter(ctx, []ID{w.msg.ID}, w.conn.Conn(), w.box.pool)
		defer leave()
		return run(ctx, owned)
	})
	ended = true
	owned.ended.Store(true)
	if err == nil {
		err = leftBehind(w.conn.Conn())
	}
	if err != nil {
		return w.fail(ctx, err)
	}
	return w.commit(ctx, stored)
}

// recovered turns a panic into an error, that of an error's own methods too.
func recovered(run func() ([]byte, error)) (stored []byte, err error) {
	defer func() {
		if value := recover(); value != nil {
			err = sound(&PanicError{Value: value, Stack: debug.Stack()})
		}
	}()
	stored, err = run()
	return stored, sound(err)
}

// leftBehind says what a handler that returned no error did to its transaction.
func leftBehind(conn *pgx.Conn) error {
	switch stateOf(conn) {
	case stateOpen:
		return nil
	case stateAborted:
		return errAborted
	case stateBusy:
		return errRowsOpen
	case stateIdle:
		return ErrTxEnded
	}
	return pgconn.ErrConnClosed
}

// fail rolls back and records a failure that counts.
func (w *work) fail(ctx context.Context, cause error) verdict {
	conn := w.conn.Conn()
	state := stateOf(conn)
	if state == stateIdle {
		if !endedTx(cause, w.msg.ID) {
			cause = errors.Join(ErrTxEnded, cause)
		}
		return verdict{outcome: Failed, attempt: w.attempt, err: cause, seen: &w.seen}
	}
	rollback(ctx, conn)
	if errors.Is(ctx.Err(), context.Canceled) || uncounted(ctx, state, cause) {
		return unavailable(cause)
	}
	if w.bare {
		return w.box.unrecorded(w.msg, cause)
	}
	w.conn.Release() // the record takes a connection of its own
	return w.box.afterFailure(ctx, w.msg, w.seen, cause)
}

// commit stores the result and commits, in one round trip.
func (w *work) commit(ctx context.Context, stored []byte) verdict {
	ctx, conn := context.WithoutCancel(ctx), w.conn.Conn()
	tag, err := w.sendCommit(ctx, conn, stored)
	switch {
	case err == nil && tag.String() == "COMMIT":
		return verdict{outcome: Executed, attempt: w.attempt}
	case err == nil:
		return w.rolledBack(ctx, pgx.ErrTxCommitRollback)
	case stateOf(conn) == stateClosed:
		return verdict{lost: true, err: err}
	}
	return w.rolledBack(ctx, err)
}

// sendCommit is bounded by the connection's own deadline, for which no timer has to be made.
func (w *work) sendCommit(ctx context.Context, conn *pgx.Conn, stored []byte) (tag pgconn.CommandTag, err error) {
	wire := conn.PgConn().Conn()
	if wire.SetDeadline(time.Now().Add(cleanupTimeout)) == nil {
		defer func() {
			if !conn.IsClosed() { // else pgx closes it behind our back, under a deadline of its own
				_ = wire.SetDeadline(time.Time{})
			}
		}()
	} else { // a tunnel may have none
		var cancel context.CancelFunc
		ctx, cancel = detached(ctx)
		defer cancel()
	}
	if stored == nil || w.bare {
		return conn.Exec(ctx, schema.Commit)
	}
	_, err = w.box.storeResult(ctx, pipe{on: conn, after: schema.Commit, tag: &tag}, w.msg.ID, stored)
	return tag, err
}

// rolledBack settles a transaction that PostgreSQL refused to commit.
func (w *work) rolledBack(ctx context.Context, cause error) verdict {
	conn := w.conn.Conn()
	rollback(ctx, conn)
	if transient(cause) {
		return unavailable(cause)
	}
	if w.bare {
		return w.box.unrecorded(w.msg, cause)
	}
	w.conn.Release()
	return w.box.afterFailure(ctx, w.msg, w.seen, cause)
}
