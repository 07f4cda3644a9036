package bench

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxDrain compares one relay with peers that empty a table of waiting messages into a publisher that does
// nothing.
func BenchmarkOutboxDrain(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 8)
	n := sized(5_000, 200_000, 1_000_000)
	watermills, rivers := sized(2_000, 100_000, 500_000), sized(500, 30_000, 100_000)
	makePlainTable(b, pool)
	mill, jobs := newMill(b, pool), newJobs(b, db)
	const ours, oneLane, plain, watermill, river = "relay, 2 lanes", "relay, 1 lane", "unlocked reader", "watermill-sql", "River"
	relay := func(lanes int) func(b *testing.B) float64 {
		return func(b *testing.B) float64 {
			fillOutbox(b, pool, n)
			return drain(b, pool, n, newSink(n), outbox.RelayConfig{Lanes: lanes})
		}
	}
	f := interleave(b, rounds(b),
		contender{ours, relay(2)},
		contender{plain, func(b *testing.B) float64 { return drainPlain(b, db, pool, n) }},
		contender{watermill, func(b *testing.B) float64 { return mill.drain(b, watermills) }},
		contender{river, func(b *testing.B) float64 { return jobs.drain(b, rivers) }},
		contender{oneLane, relay(1)},
	)
	r := newReport(b, db, "Outbox: drain with a publisher that does nothing",
		fmt.Sprintf("%d messages per round (watermill-sql %d, River %d), %d rounds, payload %d bytes, batches of %d", n, watermills, rivers, rounds(b), payloadLen, readLen),
		"relay: ordered and fenced, 10000 keys, full rows; from start to handed over",
		"unlocked reader: one connection, select order by id limit 1000, delete; same columns, no lock, no second reader possible",
		"watermill-sql "+versionOf(b, watermillModule)+": queue adapter, delete on ack, batches of 1000, one subscriber",
		"River "+versionOf(b, riverModule)+": 2000 workers, fetch every 2 ms")
	r.figures("msg/s", f)
	r.atLeast("relay / unlocked reader", f.ratio(ours, plain), 1.7)
	r.atLeast("relay / watermill-sql", f.ratio(ours, watermill), 2)
	r.atLeast("relay / River", f.ratio(ours, river), 8)
	r.noted("2 lanes / 1 lane", f.ratio(ours, oneLane))
	r.print()
}

// readLen is how many messages a reader takes at once, the relay's default.
const readLen = 1000

func makePlainTable(b *testing.B, pool *pgxpool.Pool) {
	b.Helper()
	run(b, pool, `create table public.plain_outbox (
		id bigint generated always as identity primary key, created_at timestamptz not null default clock_timestamp(),
		message_id uuid not null, channel text not null, key text, topic text not null, content_type text,
		headers jsonb not null, payload bytea not null)`)
}

const (
	insertPlain = `insert into public.plain_outbox (message_id, channel, key, topic, content_type, headers, payload)
		select gen_random_uuid(), 'default', 'order-' || n % 10000, 'orders.paid', 'application/json', '{"source":"bench"}', $2
		  from generate_series(1, $1::integer) n`
	selectPlain = `select id, created_at, message_id, channel, key, topic, content_type, headers, payload
		from public.plain_outbox order by id limit $1`
	deletePlain = `delete from public.plain_outbox where id = any($1::bigint[])`
)

type plainRow struct {
	ID          int64
	CreatedAt   time.Time
	MessageID   uuid.UUID
	Channel     string
	Key         *string
	Topic       string
	ContentType *string
	Headers     map[string]string
	Payload     []byte
}

// drainPlain is the simplest reader of an outbox: alone, without locks. Its statements are planned for every call, as
// the relay's are.
func drainPlain(b *testing.B, db *database, pool *pgxpool.Pool, n int) float64 {
	run(b, pool, "truncate public.plain_outbox")
	run(b, pool, insertPlain, n, payload)
	settle(b, pool, "public.plain_outbox")
	own := db.pool(b, 1, func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeCacheDescribe })
	defer own.Close()
	start := time.Now()
	for done := 0; done < n; {
		read, err := readPlain(b.Context(), own)
		if err != nil || read == 0 {
			b.Fatalf("%d of %d rows were read: %v", done, n, err)
		}
		done += read
	}
	return float64(n) / time.Since(start).Seconds()
}

// readPlain reads and deletes one batch.
func readPlain(ctx context.Context, pool *pgxpool.Pool) (int, error) {
	rows, err := pool.Query(ctx, selectPlain, readLen)
	if err != nil {
		return 0, err
	}
	batch, err := pgx.CollectRows(rows, pgx.RowToStructByPos[plainRow])
	if err != nil {
		return 0, err
	}
	ids := make([]int64, len(batch))
	for i := range batch {
		ids[i] = batch[i].ID
	}
	_, err = pool.Exec(ctx, deletePlain, ids)
	return len(ids), err
}
