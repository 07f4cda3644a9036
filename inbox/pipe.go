package inbox

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// sender is a connection or a transaction.
type sender interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// pipe is an executor that sends one statement in one round trip with others around it: the start of a transaction, a
// savepoint, COMMIT. A failure of any of them is the statement's failure.
type pipe struct {
	on     sender
	begin  *pgx.Tx            // not nil: begins a READ COMMITTED transaction and puts it here
	before []statement        //
	after  string             // a word of internal/schema; empty: nothing
	tag    *pgconn.CommandTag // not nil: gets the answer of after
}

type statement struct {
	sql  string
	args []any
}

// start sends the statement among the others; read is told how its answer is read when the results are closed.
func (p pipe) start(ctx context.Context, s statement, read func(*pgx.QueuedQuery)) pgx.BatchResults {
	batch := new(pgx.Batch)
	if p.begin != nil {
		batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	}
	for _, before := range p.before {
		batch.Queue(before.sql, before.args...)
	}
	read(batch.Queue(s.sql, s.args...))
	if p.after != "" {
		batch.Queue(p.after).Exec(func(tag pgconn.CommandTag) error {
			if p.tag != nil {
				*p.tag = tag
			}
			return nil
		})
	}
	results := p.on.SendBatch(ctx, batch)
	if p.begin != nil {
		*p.begin = results.Tx()
	}
	return results
}

func (p pipe) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	err = p.start(ctx, statement{sql, args}, func(q *pgx.QueuedQuery) {
		q.Exec(func(found pgconn.CommandTag) error {
			tag = found
			return nil
		})
	}).Close()
	return tag, err
}

func (p pipe) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return pipeRow{p, ctx, statement{sql, args}}
}

func (p pipe) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	results := p.start(ctx, statement{sql, args}, func(*pgx.QueuedQuery) {})
	skip := len(p.before)
	if p.begin != nil {
		skip++
	}
	for range skip {
		if _, err := results.Exec(); err != nil {
			return nil, errors.Join(err, results.Close())
		}
	}
	rows, err := results.Query()
	if err != nil {
		return nil, errors.Join(err, results.Close())
	}
	return &pipeRows{Rows: rows, results: results}, nil
}

// pipeRows closes the batch with its rows.
type pipeRows struct {
	pgx.Rows
	results pgx.BatchResults
	err     error
}

func (r *pipeRows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	r.Close()
	return false
}

func (r *pipeRows) Close() {
	r.Rows.Close()
	r.err = r.results.Close()
}

func (r *pipeRows) Err() error { return errors.Join(r.Rows.Err(), r.err) }

// pipeRow is sent when it is scanned.
type pipeRow struct {
	pipe pipe
	ctx  context.Context
	statement
}

func (r pipeRow) Scan(into ...any) error {
	missing := false
	err := r.pipe.start(r.ctx, r.statement, func(q *pgx.QueuedQuery) {
		q.QueryRow(func(row pgx.Row) error {
			err := row.Scan(into...)
			if missing = errors.Is(err, pgx.ErrNoRows); missing {
				return nil // an error would make pgx forget the prepared statements
			}
			return err
		})
	}).Close()
	if err == nil && missing {
		return pgx.ErrNoRows
	}
	return err
}
