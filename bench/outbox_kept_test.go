package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxKept measures what it costs a relay to keep what it has sent, and for how long the drop of old days holds
// others up.
func BenchmarkOutboxKept(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 8)
	n := sized(5_000, 200_000, 1_000_000)
	const deleted, kept = "deleted", "kept"
	drained := func(keep int) func(b *testing.B) float64 {
		return func(b *testing.B) float64 {
			run(b, pool, "truncate commitbox.outbox_sent")
			run(b, pool, `insert into commitbox.outbox_channel (channel, keep_days) values ('default', $1::integer)
				on conflict (channel) do update set keep_days = excluded.keep_days`, keep)
			run(b, pool, "select commitbox.outbox_sent_days(7, 1)")
			fillOutbox(b, pool, n)
			rate := drain(b, pool, n, newSink(n), outbox.RelayConfig{})
			if got := count(b, pool, "select count(*) from commitbox.outbox_sent"); got != n && got != 0 || (got == 0) != (keep == 0) {
				b.Fatalf("%d of %d messages were kept", got, n)
			}
			return rate
		}
	}
	f := interleave(b, rounds(b), contender{deleted, drained(0)}, contender{kept, drained(1)})
	var held []float64
	for range min(rounds(b), 3) {
		held = append(held, dropDays(b, pool, n))
	}
	r := newReport(b, db, "Outbox: keeping what was sent",
		fmt.Sprintf("%d messages per round, %d rounds, payload %d bytes; %d old days of %d messages each are dropped at once", n, rounds(b), payloadLen, oldDays, n),
		"held up: the longest that an insert into the table of kept messages took meanwhile, of one every millisecond")
	r.figures("msg/s", f)
	r.atLeast("kept / deleted", f.ratio(kept, deleted), 0.6)
	r.atMost("held up ms", slices.Max(held), 100)
	r.print()
}

const oldDays = 3

const insertSent = `insert into commitbox.outbox_sent (sent_at, id, created_at, message_id, shard, channel, key, topic, content_type, headers, payload)
	select $2::timestamptz, n, $2::timestamptz, gen_random_uuid(), n % 64, 'default', 'order-' || n % 10000, 'orders.paid', 'application/json', '{"source":"bench"}', $3
	  from generate_series(1, $1::integer) n`

// dropDays drops old days of n messages each, and returns the milliseconds for which it held up one who confirms.
func dropDays(b *testing.B, pool *pgxpool.Pool, n int) (held float64) {
	for day := range oldDays {
		from := time.Date(2020, 1, 1+day, 0, 0, 0, 0, time.UTC)
		run(b, pool, fmt.Sprintf(`create table commitbox.outbox_sent_%s partition of commitbox.outbox_sent for values from ('%s') to ('%s')`,
			from.Format("20060102"), from.Format(time.RFC3339), from.AddDate(0, 0, 1).Format(time.RFC3339)))
		run(b, pool, insertSent, n, from.Add(time.Hour), payload)
	}
	run(b, pool, "checkpoint")
	ctx, stop := context.WithCancel(b.Context())
	longest := make(chan float64, 1)
	go func() {
		var worst time.Duration
		for ctx.Err() == nil {
			start := time.Now()
			if _, err := pool.Exec(ctx, insertSent, 1, start, payload); err != nil && !errors.Is(err, context.Canceled) {
				b.Error(err)
			} else if err == nil {
				worst = max(worst, time.Since(start))
			}
			time.Sleep(time.Millisecond)
		}
		longest <- float64(worst.Microseconds()) / 1000
	}()
	time.Sleep(50 * time.Millisecond)
	if dropped := count(b, pool, "select dropped from commitbox.outbox_sent_days(7, 1)"); dropped != oldDays {
		b.Errorf("%d of %d old days were dropped", dropped, oldDays)
	}
	time.Sleep(50 * time.Millisecond)
	stop()
	return <-longest
}
