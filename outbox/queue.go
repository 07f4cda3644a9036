package outbox

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/db"
)

// Queue adds messages to batch with the default limits; see [Box.Queue]. Not promised: that a message whose id it returns
// is stored, until batch has been sent and its transaction has committed.
func Queue(ctx context.Context, batch *pgx.Batch, messages ...Message) ([]uuid.UUID, error) {
	return standard.Queue(ctx, batch, messages...)
}

// Queue is [Box.Enqueue] for statements that travel together: it adds to batch the statement that stores the messages, one more
// if some are for later, so that they cost no round trip of their own. They are stored in the transaction in which batch is
// sent, with tx.SendBatch or after batch.BeginTx; a batch that is sent outside of one is a transaction of its own.
//
// Bad input is answered with a *commitbox.InputError that names the field; batch is left as it was. What PostgreSQL refuses
// is in the results of the batch. Not promised: anything before the batch is sent and its transaction has committed. The
// payloads are read when it is sent: leave them as they are until then. A batch belongs to one goroutine.
func (b *Box) Queue(ctx context.Context, batch *pgx.Batch, messages ...Message) ([]uuid.UUID, error) {
	if batch == nil {
		return nil, &commitbox.InputError{Field: "batch", Problem: "is nil"}
	}
	if len(messages) == 0 {
		return nil, nil
	}
	ids, params, err := b.prepare(ctx, messages)
	if err != nil {
		return nil, err
	}
	return ids, b.store(ctx, db.New(b.schema.On(queue{batch: batch})), params)
}

// queue is an executor that only notes what is to be executed. Storing asks for no rows.
type queue struct {
	db.DBTX
	batch *pgx.Batch
}

func (q queue) Exec(_ context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	q.batch.Queue(sql, args...)
	return pgconn.CommandTag{}, nil
}
