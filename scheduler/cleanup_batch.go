package scheduler

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/internal/db"
)

// batchGoal is how long a batch should take at most. A copy of a message whose expired row is just being removed waits for
// the batch, so it stays well below what a caller would notice.
const batchGoal = 25 * time.Millisecond

// firstBatch is the size of the first batch, before it is known how long one takes.
const firstBatch = 100

// batchSize is how many rows the next batch of a kind takes: a pure rule, kept from run to run.
type batchSize struct{ rows, max int }

// after adapts the size to how long a batch took: a quarter less above the goal, a quarter more below half of it.
func (s *batchSize) after(took time.Duration) {
	switch {
	case took > batchGoal:
		s.rows -= s.rows / 4
	case took < batchGoal/2:
		s.rows = min(s.max, s.rows+max(1, s.rows/4))
	}
}

// halve is for a batch that ran into a timeout. False: it was one row, there is nothing to halve.
func (s *batchSize) halve() bool {
	if s.rows == 1 {
		return false
	}
	s.rows = max(1, s.rows/2)
	return true
}

// task is one kind of row of one consumer. Its step removes, or buries, at most so many rows in the transaction of q.
type task struct {
	kind     string
	consumer string // empty for the outbox
	step     func(ctx context.Context, q *db.Queries, atMost int32) (int64, error)
}

func (t *task) name() string { return t.kind + " " + t.consumer }

// batch does one batch and says whether there may be more. One that runs into a timeout has changed nothing and is tried again
// at once with half the rows, whatever the budget: a run that is stopped before its first batch fits would never get anywhere.
func (r *cleaning) batch(ctx context.Context, t *task) (done int64, more bool, err error) {
	for size := r.c.size(t.kind); ; {
		rows, start := size.rows, time.Now()
		err = r.bounded(ctx, r.c.cfg.StatementTimeout, r.c.cfg.LockTimeout, func(q *db.Queries) (err error) {
			done, err = t.step(ctx, q, int32(rows))
			return err
		})
		switch {
		case err == nil:
			size.after(time.Since(start))
			return done, done >= int64(rows), nil
		case ctx.Err() != nil || !gaveUp(err) || !size.halve():
			return 0, false, err
		}
		r.c.cfg.Logger.Warn("cleanup: a batch ran into a timeout and is made smaller",
			"kind", t.kind, "consumer", t.consumer, "rows", rows, "next_rows", size.rows, "error", err)
	}
}

var readCommitted = pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}

// once runs statements that are no batch: they are few, and one may wait for a moment until another process has made a partition.
func (r *cleaning) once(ctx context.Context, do func(*db.Queries) error) error {
	return r.bounded(ctx, time.Minute, 10*time.Second, do)
}

// bounded runs statements in one transaction, with timeouts in the server.
func (r *cleaning) bounded(ctx context.Context, statement, lock time.Duration, do func(*db.Queries) error) error {
	return pgx.BeginTxFunc(ctx, r.pool, readCommitted, func(tx pgx.Tx) error {
		q := db.New(r.c.schema.On(tx))
		err := q.CleanupTimeouts(ctx, db.CleanupTimeoutsParams{
			StatementMilliseconds: milliseconds(statement), LockMilliseconds: milliseconds(lock),
		})
		if err != nil {
			return err
		}
		return do(q)
	})
}

func milliseconds(d time.Duration) string { return strconv.FormatInt(d.Milliseconds(), 10) }

// gaveUp says whether the server gave a statement up: statement_timeout or lock_timeout.
func gaveUp(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "57014" || pg.Code == "55P03")
}

// answered says whether an error is the server's answer to a statement, after which the connection can go on.
func answered(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Severity != "FATAL" && pg.Severity != "PANIC"
}
