package inbox

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
)

// CompleteIn ends leased work inside a business transaction that it runs itself, READ COMMITTED on the box's pool: the
// row is completed first, which is the guard, then fn writes, then the result is stored and all of it committed. Either
// the message is completed with fn's writes, or neither. It returns what a replay will return.
//
// A lost lease is ErrLeaseLost and fn does not run. If fn fails, its writes are rolled back, its error is returned and
// the lease is as it was: go on with it, or call Fail. fn runs again after a serialization failure or a deadlock. If fn
// ends the transaction in another way than by returning, the error is ErrTxEnded and the lease has ended. Work that this
// lease has completed already is not run again; its stored result is returned. While the transaction is open, its lock on
// the row is the lease, and no time limits it. The rules for tx are those of [Process].
//
// Not promised: that fn runs once; every run but the last one is rolled back. After ErrOutcomeUnknown its writes may be
// committed: call it again or let the message be delivered again, and do not repeat fn's work elsewhere.
func CompleteIn[R any](ctx context.Context, lease *Lease, fn func(ctx context.Context, tx pgx.Tx) (R, error)) (R, error) {
	var value R
	if fn == nil {
		return value, &commitbox.InputError{Field: "fn", Problem: "is nil"}
	}
	run := func(ctx context.Context, tx pgx.Tx) (stored []byte, err error) {
		value, err = fn(ctx, tx)
		if err != nil {
			return nil, err
		}
		return roundTrip(&value, lease.box.ResultMax)
	}
	for conflicts := 0; ; conflicts++ {
		err := lease.completeOnce(ctx, run)
		if errors.Is(err, errCompleted) {
			value, _, err = IsCompleted[R](ctx, lease.box, lease.msg.ID)
			return value, err
		}
		if !conflict(err) || conflicts == conflictsMax {
			return value, err
		}
		lease.box.Observer.Observe(commitbox.InboxRetries, 1, lease.msg.ID.Consumer)
		if !sleep(ctx, jitter(pollFirst<<conflicts)) {
			return value, err
		}
	}
}

// errCompleted says that this lease has completed the message before.
var errCompleted = errors.New("the lease has completed the message")

func (l *Lease) completeOnce(ctx context.Context, run handler) error {
	conn, err := l.box.pool.Acquire(ctx)
	if err != nil {
		return l.unavailable(err)
	}
	defer conn.Release()
	l.term.lock()
	defer func() {
		rollback(ctx, conn.Conn())
		l.reclaim(ctx, conn.Conn())
	}()
	start := time.Now()
	tx, err := l.guard(ctx, conn)
	if err != nil {
		return err
	}
	stored, err := l.runIn(ctx, conn.Conn(), tx, run)
	if errors.Is(err, ErrTxEnded) {
		l.end(errLeaseEnded) // half of the work may be committed: nobody goes on with it
	}
	if err != nil {
		return err
	}
	if err = l.commit(ctx, conn, stored); err == nil {
		l.fill(ctx, start, stored)
	}
	return err
}

// fill keeps a copy of the completed row in the cache.
func (l *Lease) fill(ctx context.Context, start time.Time, stored []byte) {
	l.box.fill(ctx, l.msg.ID, l.box.completedSince(start, l.msg.Fingerprint, stored))
}

// runIn calls the handler, and says what it did to its transaction.
func (l *Lease) runIn(ctx context.Context, conn *pgx.Conn, tx pgx.Tx, run handler) ([]byte, error) {
	owned := &ownedTx{tx: tx}
	defer owned.ended.Store(true)
	ctx, leave := l.box.enter(ctx, []ID{l.msg.ID}, conn, l.box.pool)
	defer leave()
	stored, err := run(ctx, owned)
	err = sound(err)
	switch {
	case err == nil:
		err = leftBehind(conn)
	case stateOf(conn) == stateIdle && !errors.Is(err, ErrTxEnded):
		err = errors.Join(ErrTxEnded, err)
	}
	return stored, err
}

// commit stores the result and commits, in one round trip.
func (l *Lease) commit(ctx context.Context, conn *pgxpool.Conn, stored []byte) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	w := &work{box: l.box, msg: &l.msg}
	tag, err := w.sendCommit(ctx, conn.Conn(), stored)
	switch {
	case err == nil && tag.String() == "COMMIT":
		l.done()
		return nil
	case err == nil:
		return pgx.ErrTxCommitRollback
	case stateOf(conn.Conn()) == stateClosed:
		return l.findOut(ctx, err)
	}
	return err
}

// guard completes the row in a new transaction, or says why not.
func (l *Lease) guard(ctx context.Context, conn *pgxpool.Conn) (pgx.Tx, error) {
	var tx pgx.Tx
	p := pipe{on: conn.Conn(), begin: &tx, before: l.lock()}
	n, err := l.queries(p).InboxComplete(ctx, l.completion(nil))
	if err != nil {
		return nil, l.unavailable(err)
	}
	if n > 0 {
		return tx, nil
	}
	row, err := l.held(ctx, tx)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, l.lost()
	case err != nil:
		return nil, l.unavailable(err)
	case row.Status == statusPending && row.Same:
		return nil, l.unavailable(errRowLocked)
	case row.Status == statusCompleted:
		l.done()
		return nil, errCompleted
	}
	return nil, l.lost()
}

// findOut asks what became of a COMMIT whose answer was lost: completed, rolled back if the row can be renewed, or still
// open.
func (l *Lease) findOut(ctx context.Context, cause error) error {
	for wait := newPoll(cleanupTimeout); ; {
		row, err := l.held(ctx, l.box.pool)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return l.lost()
		case err == nil && row.Status == statusCompleted:
			l.done()
			return nil
		}
		if n, err := l.touch(ctx, l.box.pool); err == nil && n > 0 {
			return l.unavailable(cause)
		}
		if !wait.next(ctx) {
			return &Error{ID: l.msg.ID, Outcome: Unknown, Attempt: l.attempt, Err: cause}
		}
	}
}
