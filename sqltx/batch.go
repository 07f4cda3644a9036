package sqltx

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// results runs the statements of a batch when their answers are asked for, and the others on Close. The first error ends it.
type results struct {
	view   view
	ctx    context.Context
	queue  []*pgx.QueuedQuery
	closed bool
	err    error
}

var errBatchEnd = errors.New("sqltx: the batch has no more results")

// next takes the next statement.
func (r *results) next() (*pgx.QueuedQuery, error) {
	switch {
	case r.err != nil:
		return nil, r.err
	case r.closed || len(r.queue) == 0:
		return nil, errBatchEnd
	}
	q := r.queue[0]
	r.queue = r.queue[1:]
	return q, nil
}

func (r *results) Exec() (pgconn.CommandTag, error) {
	q, err := r.next()
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	tag, err := r.view.Exec(r.ctx, q.SQL, q.Arguments...)
	r.err = err
	return tag, err
}

func (r *results) Query() (pgx.Rows, error) {
	q, err := r.next()
	if err != nil {
		return &rows{err: err}, err
	}
	found, err := r.view.Query(r.ctx, q.SQL, q.Arguments...)
	r.err = err
	return found, err
}

func (r *results) QueryRow() pgx.Row {
	found, err := r.Query()
	return row{found, err}
}

func (r *results) Close() error {
	for r.err == nil && !r.closed && len(r.queue) > 0 {
		before := len(r.queue)
		if fn := r.queue[0].Fn; fn != nil {
			if err := fn(r); r.err == nil {
				r.err = err
			}
		}
		if r.err == nil && len(r.queue) == before { // no function, or one that did not ask
			_, _ = r.Exec() // its error is kept
		}
	}
	r.closed = true
	return r.err
}

func (r *results) Tx() pgx.Tx { return nil }
