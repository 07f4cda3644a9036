package bench

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxScheduled measures what messages that were scheduled among many others cost a relay that drains a backlog,
// with 1000 due per second, and how late they come. One that is due takes its place behind what waits, so those that are due
// while the backlog is there wait for it; the bound is for those that find nothing before them.
func BenchmarkOutboxScheduled(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 8)
	hot, scheduled, seconds := sized(5_000, 300_000, 1_500_000), sized(5_000, 100_000, 1_000_000), sized(2, 10, 20)
	var behind, late []float64
	const without, with = "nothing scheduled", "1000 due per second"
	f := interleave(b, min(rounds(b), 3),
		contender{without, func(b *testing.B) float64 { return newPunctual(hot, 0).drain(b, pool, 0) }},
		contender{with, func(b *testing.B) float64 {
			p := newPunctual(hot, 1000*seconds)
			rate := p.drain(b, pool, scheduled)
			for _, d := range p.delays {
				if d.due.Before(p.cleared) {
					behind = append(behind, d.ms)
				} else {
					late = append(late, d.ms)
				}
			}
			return rate
		}})
	r := newReport(b, db, "Outbox: scheduled messages beside a backlog",
		fmt.Sprintf("%d messages of 10000 keys waiting; %d scheduled, of which %d are due within %d s from the start; payload %d bytes", hot, scheduled, 1000*seconds, seconds, payloadLen),
		"late: from the due time to the call of Publish, on one machine's clock")
	r.figures("msg/s of the backlog", f)
	r.atLeast("backlog with / without", f.ratio(with, without), 0.9)
	r.atMost("late ms max", slices.Max(late), 1000)
	r.noted("late ms p99", quantile(late, 0.99))
	r.noted("late ms p50", quantile(late, 0.5))
	if len(behind) > 0 {
		r.noted("late ms max, behind the backlog", slices.Max(behind))
	}
	r.print()
}

const scheduledTopic = "reminder"

// insertScheduled schedules one message for each millisecond from some seconds on. Its due time is in the payload.
const insertScheduled = `insert into commitbox.outbox_scheduled (due_at, message_id, channel, key, topic, content_type, headers, payload)
	select d.at, gen_random_uuid(), 'default', 'later-' || n % 10000, 'reminder', 'text/plain', '{"source":"bench"}',
	       convert_to(rpad((extract(epoch from d.at) * 1000000)::bigint::text, $2::integer), 'UTF8')
	  from generate_series(1, $1::integer) n, lateral (select statement_timestamp() + n * interval '1 ms' + $3::integer * interval '1 s' as at) d`

// punctual is a publisher that notes how late scheduled messages are. A backlog and those that are due are waited for
// apart.
type punctual struct {
	backlog, due *sink
	cleared      time.Time // when the backlog had gone
	mu           sync.Mutex
	delays       []delay
}

// delay is how late a message was.
type delay struct {
	due time.Time
	ms  float64
}

func newPunctual(backlog, due int) *punctual {
	return &punctual{backlog: newSink(backlog), due: newSink(due)}
}

func (p *punctual) Publish(_ context.Context, batch []outbox.Record) []error {
	now, other := time.Now(), 0
	p.mu.Lock()
	for i := range batch {
		if batch[i].Topic != scheduledTopic {
			other++
			continue
		}
		due, _ := strconv.ParseInt(strings.TrimSpace(string(batch[i].Payload)), 10, 64)
		at := time.UnixMicro(due)
		p.delays = append(p.delays, delay{at, float64(now.Sub(at).Microseconds()) / 1000})
	}
	p.mu.Unlock()
	p.backlog.add(other)
	p.due.add(len(batch) - other)
	return make([]error, len(batch))
}

// drain returns the messages of the backlog per second.
func (p *punctual) drain(b *testing.B, pool *pgxpool.Pool, scheduled int) float64 {
	run(b, pool, "truncate commitbox.outbox_scheduled")
	fillOutbox(b, pool, int(p.backlog.want))
	if scheduled > 0 {
		run(b, pool, insertScheduled, scheduled, payloadLen, sized(2, 15, 90))
		run(b, pool, "vacuum (analyze) commitbox.outbox_scheduled")
		var ahead float64
		const first = "select extract(epoch from min(due_at) - clock_timestamp())::float8 from commitbox.outbox_scheduled"
		if err := pool.QueryRow(b.Context(), first).Scan(&ahead); err != nil || ahead < 0 {
			b.Fatalf("the first message is due in %.1f s, before the relay can start: %v", ahead, err)
		}
		time.Sleep(time.Duration(ahead * float64(time.Second)))
	}
	start := time.Now()
	stop := startRelay(b, pool, p, outbox.RelayConfig{})
	p.backlog.wait(b)
	p.cleared = time.Now()
	took := p.cleared.Sub(start)
	if scheduled > 0 {
		p.due.wait(b)
	}
	stop()
	return float64(p.backlog.want) / took.Seconds()
}
