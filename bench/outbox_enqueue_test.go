package bench

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// newMessage is the message of a business transaction.
func newMessage() outbox.Message {
	return outbox.Message{
		Topic: "orders.paid", Key: "order-" + uuid.NewString(), ContentType: "application/json",
		Headers: map[string]string{"source": "bench"}, Payload: payload,
	}
}

func enqueue(ctx context.Context, tx pgx.Tx) error {
	_, err := outbox.Enqueue(ctx, tx, newMessage())
	return err
}

const insertRaw = `insert into peer.outbox_message (message_id, channel, key, topic, content_type, headers, payload)
	values ($1, 'default', $2::text, $3::text, $4::text, $5::jsonb, $6)`

// insertMessage is the row that enqueue writes, written by hand.
func insertMessage(ctx context.Context, tx pgx.Tx) error {
	m := newMessage()
	_, err := tx.Exec(ctx, insertRaw, uuid.Must(uuid.NewV7()), m.Key, m.Topic, m.ContentType, m.Headers, m.Payload)
	return err
}

// business is a whole business transaction: one change, and what announces it.
func business(pool *pgxpool.Pool, announce func(context.Context, pgx.Tx) error) func(context.Context, int) error {
	return func(ctx context.Context, _ int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if err := changeBusiness(ctx, tx); err != nil {
				return err
			}
			return announce(ctx, tx)
		})
	}
}

// businessQueued is business with the message in the batch of the change.
func businessQueued(pool *pgxpool.Pool) func(context.Context, int) error {
	return func(ctx context.Context, _ int) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			batch := new(pgx.Batch)
			batch.Queue(insertBusiness, payload)
			if _, err := outbox.Queue(ctx, batch, newMessage()); err != nil {
				return err
			}
			return tx.SendBatch(ctx, batch).Close()
		})
	}
}

// BenchmarkOutboxEnqueue compares what a message costs its business transaction.
func BenchmarkOutboxEnqueue(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, workers)
	n := sized(300, 3_000, 10_000)
	mill, jobs := newMill(b, pool), newJobs(b, db)
	throughput := func(name string, do func(context.Context, int) error) contender {
		return contender{name, func(b *testing.B) float64 {
			run(b, pool, "truncate public.business, commitbox.outbox_message, peer.outbox_message, watermill_bench, river_job")
			return perSecond(b, workers, n, do)
		}}
	}
	const ours, queued, raw, watermill, river = "Enqueue", "Queue", "raw insert", "watermill-sql Publish", "River InsertTx"
	f := interleave(b, turns(b), throughput(ours, business(pool, enqueue)), throughput(queued, businessQueued(pool)),
		throughput(raw, business(pool, insertMessage)), throughput(watermill, business(pool, mill.publish)), throughput(river, business(pool, jobs.insert)))
	r := newReport(b, db, "Outbox: business transaction with one message",
		fmt.Sprintf("%d transactions per round, %d rounds, %d writers, payload and business row of %d bytes", n, turns(b), workers, payloadLen),
		"each: begin, business insert, the same message (topic, key, content type, a header, payload), commit",
		"raw insert: the row of Enqueue, in the same table; Queue: the message in one round trip with the business insert",
		"watermill-sql "+versionOf(b, watermillModule)+": queue adapter; River "+versionOf(b, riverModule))
	r.figures("tx/s", f)
	r.atLeast("Enqueue / raw insert", f.ratio(ours, raw), 0.95)
	r.atLeast("Queue / watermill-sql", f.ratio(queued, watermill), 1)
	r.atLeast("Enqueue / watermill-sql", f.ratio(ours, watermill), 1)
	r.atLeast("Enqueue / River", f.ratio(ours, river), 1)
	r.print()
}

// BenchmarkOutboxPolling measures what a relay that looks often costs saturating writers.
func BenchmarkOutboxPolling(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, workers)
	n := sized(300, 15_000, 60_000)
	beside := func(cfg outbox.RelayConfig) func(b *testing.B) float64 {
		return func(b *testing.B) float64 { return writeBeside(b, pool, n, cfg) }
	}
	const often, seldom = "relay at its defaults", "relay that looks every 100 ms"
	f := interleave(b, rounds(b),
		contender{often, beside(outbox.RelayConfig{})},
		contender{seldom, beside(outbox.RelayConfig{PollMin: 100 * time.Millisecond})})
	r := newReport(b, db, "Outbox: writers beside a draining relay",
		fmt.Sprintf("%d transactions per round, %d rounds, %d writers, payload and business row of %d bytes", n, rounds(b), workers, payloadLen),
		"the bound of 0.95 is for machines with more than two cores: client, relay and server share them")
	r.figures("tx/s", f)
	const name = "defaults / every 100 ms"
	if runtime.NumCPU() > 2 {
		r.atLeast(name, f.ratio(often, seldom), 0.95)
	} else {
		r.noted(name, f.ratio(often, seldom))
	}
	r.print()
}

// writeBeside returns the writers' transactions per second while a relay publishes what they write.
func writeBeside(b *testing.B, pool *pgxpool.Pool, n int, cfg outbox.RelayConfig) float64 {
	emptyOutbox(b, pool)
	run(b, pool, "truncate public.business")
	s := newSink(n)
	defer startRelay(b, pool, s, cfg)()
	balanced(b, pool, 1)
	rate := perSecond(b, workers, n, business(pool, enqueue))
	s.wait(b)
	return rate
}
