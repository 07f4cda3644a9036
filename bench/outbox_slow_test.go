package bench

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxSlowPublisher measures how relays add up where the destination, not the database, takes the time.
func BenchmarkOutboxSlowPublisher(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 8)
	n := sized(3_000, 60_000, 300_000)
	const pause, batch = 2 * time.Millisecond, 100
	shared := func(relays, lanes int) func(b *testing.B) float64 {
		return func(b *testing.B) float64 {
			return drainShared(b, pool, n, relays, pause, outbox.RelayConfig{Lanes: lanes, Batch: batch})
		}
	}
	const four, one, single = "4 relays, 2 lanes each", "1 relay, 2 lanes", "1 relay, 1 lane"
	f := interleave(b, rounds(b), contender{four, shared(4, 2)}, contender{one, shared(1, 2)}, contender{single, shared(1, 1)})
	r := newReport(b, db, "Outbox: a publisher that takes 2 ms per call",
		fmt.Sprintf("%d messages per round in one transaction, %d rounds, batches of %d, payload %d bytes, 10000 keys", n, rounds(b), batch, payloadLen),
		"from the commit of the messages to the last confirmation; the relays run and share the shards before")
	r.figures("msg/s", f)
	r.atLeast("4 relays / 1 lane", f.ratio(four, single), 3)
	r.noted("2 lanes / 1 lane", f.ratio(one, single))
	r.print()
}

// drainShared lets relays publish n messages that appear at once, and returns messages per second.
func drainShared(b *testing.B, pool *pgxpool.Pool, n, relays int, pause time.Duration, cfg outbox.RelayConfig) float64 {
	emptyOutbox(b, pool)
	s := newSink(n)
	s.pause = pause
	for range relays {
		defer startRelay(b, pool, s, cfg)()
	}
	balanced(b, pool, relays)
	run(b, pool, insertMessages, n, payload)
	start := time.Now()
	s.wait(b)
	return float64(n) / time.Since(start).Seconds()
}
