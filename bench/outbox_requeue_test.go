package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxRequeue measures what dead messages that are requeued at a rate cost the keys of a backlog.
func BenchmarkOutboxRequeue(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 8)
	backlog, dead, rate := sized(5_000, 300_000, 1_500_000), sized(500, 20_000, 100_000), sized(1_000, 2_000, 2_000)
	const without, with = "nothing requeued", "requeued at the rate"
	f := interleave(b, min(rounds(b), 3),
		contender{without, func(b *testing.B) float64 { return newOrderly(backlog, 0).drain(b, pool, rate) }},
		contender{with, func(b *testing.B) float64 { return newOrderly(backlog, dead).drain(b, pool, rate) }})
	r := newReport(b, db, "Outbox: requeue of dead messages beside a backlog",
		fmt.Sprintf("%d messages of 10000 keys waiting, %d dead ones of 1000 others, requeued at %d per second; payload %d bytes", backlog, dead, rate, payloadLen),
		"every message of every key came once and after the one before it, or the benchmark fails")
	r.figures("msg/s of the backlog", f)
	r.atLeast("backlog with / without", f.ratio(with, without), 0.85)
	r.print()
}

// A message's number is in its payload; keys that were dead have topic "again".
const (
	insertNumbered = `insert into commitbox.outbox_message (message_id, channel, key, topic, content_type, headers, payload)
		select gen_random_uuid(), 'default', 'order-' || n % 10000, 'orders.paid', 'application/json', '{"source":"bench"}', int8send(n) || $2::bytea
		  from generate_series(1, $1::bigint) n`
	insertDead = `insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, key, topic, content_type, headers, payload, last_error)
		select nextval('commitbox.outbox_seq'), now(), gen_random_uuid(), commitbox.outbox_shard_of('again-' || n % 1000), 10, 'default', 'again-' || n % 1000,
		       'again', 'application/json', '{"source":"bench"}', int8send(n) || $2::bytea, 'refused'
		  from generate_series(1, $1::bigint) n`
)

// orderly is a publisher that sees to it that the numbers of each key rise.
type orderly struct {
	backlog, again *sink
	mu             sync.Mutex
	last           map[string]uint64
	wrong          string
}

func newOrderly(backlog, dead int) *orderly {
	return &orderly{backlog: newSink(backlog), again: newSink(dead), last: map[string]uint64{}}
}

func (p *orderly) Publish(_ context.Context, batch []outbox.Record) []error {
	again := 0
	p.mu.Lock()
	for i := range batch {
		r := &batch[i]
		number := binary.BigEndian.Uint64(r.Payload)
		if number <= p.last[r.Key] {
			p.wrong = fmt.Sprintf("key %s: %d came after %d", r.Key, number, p.last[r.Key])
		}
		p.last[r.Key] = number
		if r.Topic == "again" {
			again++
		}
	}
	p.mu.Unlock()
	p.again.add(again)
	p.backlog.add(len(batch) - again)
	return make([]error, len(batch))
}

// drain returns the messages of the backlog per second.
func (p *orderly) drain(b *testing.B, pool *pgxpool.Pool, rate int) float64 {
	emptyOutbox(b, pool)
	backlog, dead := int(p.backlog.want), int(p.again.want)
	run(b, pool, insertNumbered, backlog, payload[8:])
	run(b, pool, insertDead, dead, payload[8:])
	settle(b, pool, "commitbox.outbox_message, commitbox.outbox_dead")
	operator, err := outbox.NewOperator(pool, "")
	if err != nil {
		b.Fatal(err)
	}
	requeued := make(chan error, 1)
	start := time.Now()
	stop := startRelay(b, pool, p, outbox.RelayConfig{})
	go func() {
		n, err := operator.RequeueMany(b.Context(), outbox.RequeueFilter{Rate: rate})
		if err == nil && n != dead {
			err = fmt.Errorf("%d of %d messages were requeued", n, dead)
		}
		requeued <- err
	}()
	p.backlog.wait(b)
	took := time.Since(start)
	if err := <-requeued; err != nil {
		b.Fatal(err)
	}
	if dead > 0 {
		p.again.wait(b)
	}
	stop()
	if p.wrong != "" {
		b.Fatal(p.wrong)
	}
	return float64(backlog) / took.Seconds()
}
