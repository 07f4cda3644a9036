package bench

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxBlockedKey measures what a key that fails, with many messages behind it, costs the other keys.
func BenchmarkOutboxBlockedKey(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 8)
	followers := sized(100, 15_000, 100_000)
	others := 60 * followers // 30 s at 200 000 per second for 100 000; a third as many wait behind them, so that no lane runs dry
	const free, blocked = "free", "one key blocked"
	f := interleave(b, min(rounds(b), 3),
		contender{free, func(b *testing.B) float64 { return drainOthers(b, pool, others, 0) }},
		contender{blocked, func(b *testing.B) float64 { return drainOthers(b, pool, others, followers) }})
	took := float64(others) / f.median(blocked)
	r := newReport(b, db, "Outbox: one blocked key among others",
		fmt.Sprintf("%d messages of 10000 other keys, %d of the blocked key among them, %d rounds of %.1f s, payload %d bytes",
			others, followers, min(rounds(b), 3), took, payloadLen))
	r.figures("msg/s of other keys", f)
	r.atLeast("blocked / free", f.ratio(blocked, free), 0.85)
	r.print()
}

const blockedKey = "blocked"

// refusing is a publisher that one key does not get through.
type refusing struct{ sink *sink }

var errRefused = errors.New("refused")

func (p refusing) Publish(_ context.Context, batch []outbox.Record) []error {
	errs, passed := make([]error, len(batch)), 0
	for i := range batch {
		if batch[i].Key == blockedKey {
			errs[i] = errRefused
		} else {
			passed++
		}
	}
	p.sink.add(passed)
	return errs
}

// insertMixed puts one message of the blocked key behind every 60 others.
const insertMixed = `insert into commitbox.outbox_message (message_id, channel, key, topic, content_type, headers, payload)
	select gen_random_uuid(), 'default', case when n % 61 = 0 then 'blocked' else 'order-' || n % 10000 end, 'orders.paid',
	       'application/json', '{"source":"bench"}', $2
	  from generate_series(1, $1::integer) n`

// drainOthers returns the messages per second of the keys that are not blocked.
func drainOthers(b *testing.B, pool *pgxpool.Pool, others, followers int) float64 {
	emptyOutbox(b, pool)
	insert := insertMessages
	if followers > 0 {
		insert = insertMixed
	}
	others, followers = others*4/3, followers*4/3
	run(b, pool, insert, others+followers, payload)
	settle(b, pool, "commitbox.outbox_message")
	p := refusing{newSink(others * 3 / 4)}
	start := time.Now()
	stop := startRelay(b, pool, p, outbox.RelayConfig{})
	p.sink.wait(b)
	took := time.Since(start)
	stop()
	const waiting = `select (select count(*) from commitbox.outbox_deferred where key = 'blocked')
		+ (select count(*) from commitbox.outbox_message where key = 'blocked')`
	if left := count(b, pool, waiting); left != followers {
		b.Fatalf("%d messages wait behind the blocked key, not %d", left, followers)
	}
	return float64(p.sink.want) / took.Seconds()
}
