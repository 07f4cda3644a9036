package bench

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

const batchLen = 50

// BenchmarkInboxBatch compares batches with single messages at the same number of workers.
func BenchmarkInboxBatch(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, workers)
	box := newInbox(b, pool, "")
	n := sized(200, 3_000, 10_000)
	batches := sized(40, 600, 2_000)
	batched := func(name string, fn handler) contender {
		return contender{name, func(b *testing.B) float64 {
			run(b, pool, "truncate public.business, commitbox.inbox, commitbox.inbox_step")
			rate := perSecond(b, workers, batches, func(ctx context.Context, _ int) error { return processBatch(ctx, box, fn) })
			if got := count(b, pool, "select count(*) from public.business"); got != batches*batchLen {
				b.Fatalf("%s: %d business rows after %d messages", name, got, batches*batchLen)
			}
			return rate * batchLen
		}}
	}
	const single, queued, each = "Process", "ProcessBatch, one pgx.Batch", "ProcessBatch, one round trip each"
	f := interleave(b, turns(b),
		contender{single, func(b *testing.B) float64 {
			run(b, pool, "truncate public.business, commitbox.inbox, commitbox.inbox_step")
			return perSecond(b, workers, n, func(ctx context.Context, _ int) error { return process(ctx, box, messageID()) })
		}},
		batched(queued, queueAll),
		batched(each, oneByOne),
	)
	r := newReport(b, db, "Inbox: batches of 50",
		fmt.Sprintf("%d single messages or %d batches per round, %d rounds, %d workers, business row of %d bytes, UUIDv7 ids",
			n, batches, turns(b), workers, payloadLen))
	r.figures("msg/s", f)
	r.atLeast("batch / Process", f.ratio(queued, single), 12)
	r.noted("batch of round trips / Process", f.ratio(each, single))
	r.print()
}

type handler func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]inbox.Void, error)

func processBatch(ctx context.Context, box *inbox.Box, fn handler) error {
	msgs := make([]inbox.Message, batchLen)
	for i := range msgs {
		msgs[i].ID = inbox.ID{Consumer: consumer, Message: messageID()}
	}
	for _, answer := range inbox.ProcessBatch(ctx, box, msgs, fn) {
		if answer.Err != nil {
			return answer.Err
		}
	}
	return nil
}

func queueAll(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]inbox.Void, error) {
	batch := new(pgx.Batch)
	for range msgs {
		batch.Queue(insertBusiness, payload)
	}
	return nil, tx.SendBatch(ctx, batch).Close()
}

func oneByOne(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]inbox.Void, error) {
	for range msgs {
		if err := changeBusiness(ctx, tx); err != nil {
			return nil, err
		}
	}
	return nil, nil
}
