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

func (p pipe) send(ctx context.Context, queue func(*pgx.Batch)) error {
	batch := new(pgx.Batch)
	if p.begin != nil {
		batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	}
	for _, s := range p.before {
		batch.Queue(s.sql, s.args...)
	}
	queue(batch)
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
	return results.Close()
}

func (p pipe) Exec(ctx context.Context, sql string, args ...any) (tag pgconn.CommandTag, err error) {
	err = p.send(ctx, func(batch *pgx.Batch) {
		batch.Queue(sql, args...).Exec(func(found pgconn.CommandTag) error {
			tag = found
			return nil
		})
	})
	return tag, err
}

func (p pipe) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return pipeRow{p, ctx, statement{sql, args}}
}

var errPipeQuery = errors.New("inbox: a pipe has no Query")

func (p pipe) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, errPipeQuery }

// pipeRow is sent when it is scanned.
type pipeRow struct {
	pipe pipe
	ctx  context.Context
	statement
}

func (r pipeRow) Scan(into ...any) error {
	missing := false
	err := r.pipe.send(r.ctx, func(batch *pgx.Batch) {
		batch.Queue(r.sql, r.args...).QueryRow(func(row pgx.Row) error {
			err := row.Scan(into...)
			if missing = errors.Is(err, pgx.ErrNoRows); missing {
				return nil // an error would make pgx forget the prepared statements
			}
			return err
		})
	})
	if err == nil && missing {
		return pgx.ErrNoRows
	}
	return err
}
