package bench

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// sink is a publisher that confirms everything and says when it has seen a number of messages.
type sink struct {
	pause time.Duration // how long a call takes
	want  int64
	seen  atomic.Int64
	full  chan struct{}
	once  sync.Once
}

func newSink(want int) *sink { return &sink{want: int64(want), full: make(chan struct{})} }

func (s *sink) Publish(ctx context.Context, batch []outbox.Record) []error {
	if s.pause > 0 {
		time.Sleep(s.pause)
	}
	s.add(len(batch))
	return make([]error, len(batch))
}

func (s *sink) add(n int) {
	if s.seen.Add(int64(n)) >= s.want {
		s.once.Do(func() { close(s.full) })
	}
}

// wait returns when the sink has seen all that it wants.
func (s *sink) wait(b *testing.B) {
	b.Helper()
	awaitFor(b, s.full, 30*time.Minute)
}

func awaitFor(b *testing.B, done <-chan struct{}, limit time.Duration) {
	b.Helper()
	select {
	case <-done:
	case <-time.After(limit):
		b.Fatalf("not done after %v", limit)
	}
}

// loud makes a relay that cannot work say why: its benchmark would only be slow.
var loud = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))

// startRelay runs a relay until the returned function is called, which waits for it.
func startRelay(b *testing.B, pool *pgxpool.Pool, publisher outbox.Publisher, cfg outbox.RelayConfig) (stop func()) {
	b.Helper()
	cfg.Logger = loud
	relay, err := outbox.NewRelay(pool, publisher, cfg)
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithCancel(b.Context())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	return func() {
		b.Helper()
		cancel()
		if err := <-ended; err != nil {
			b.Fatal(err)
		}
	}
}

// drain publishes all n messages with one relay and returns messages per second, from the relay's start until it has
// deleted everything and handed over.
func drain(b *testing.B, pool *pgxpool.Pool, n int, s *sink, cfg outbox.RelayConfig) float64 {
	b.Helper()
	start := time.Now()
	stop := startRelay(b, pool, s, cfg)
	s.wait(b)
	stop()
	took := time.Since(start)
	if left := count(b, pool, "select count(*) from commitbox.outbox_message"); left != 0 {
		b.Fatalf("%d of %d messages were not deleted", left, n)
	}
	return float64(n) / took.Seconds()
}

// balanced waits until a number of relays share the shards evenly.
func balanced(b *testing.B, pool *pgxpool.Pool, relays int) {
	b.Helper()
	const evenly = `select count(*) from (select 1 from commitbox.outbox_shard where owner is not null
		group by owner having count(*) = 64 / $1) s`
	deadline := time.Now().Add(2 * time.Minute)
	for count(b, pool, evenly, relays) != relays {
		if time.Now().After(deadline) {
			b.Fatalf("%d relays do not share the shards", relays)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

const insertMessages = `insert into commitbox.outbox_message (message_id, channel, key, topic, content_type, headers, payload)
	select gen_random_uuid(), 'default', 'order-' || n % 10000, 'orders.paid', 'application/json', '{"source":"bench"}', $2
	  from generate_series(1, $1::integer) n`

// fillOutbox replaces what is in the outbox with n messages of 10 000 keys.
func fillOutbox(b *testing.B, pool *pgxpool.Pool, n int) {
	b.Helper()
	emptyOutbox(b, pool)
	run(b, pool, insertMessages, n, payload)
	settle(b, pool, "commitbox.outbox_message")
}

func emptyOutbox(b *testing.B, pool *pgxpool.Pool) {
	b.Helper()
	run(b, pool, "truncate commitbox.outbox_message, commitbox.outbox_deferred, commitbox.outbox_blocked, commitbox.outbox_dead")
}

// settle brings a filled table into the same state for every contender: vacuumed, analysed and written to disk.
func settle(b *testing.B, pool *pgxpool.Pool, table string) {
	b.Helper()
	run(b, pool, "vacuum (analyze) "+table)
	run(b, pool, "checkpoint")
}

// changingSink is a publisher whose sink is replaced between two parts of a run.
type changingSink struct {
	mu   sync.Mutex
	sink *sink
}

func (c *changingSink) replace(s *sink) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sink = s
}

func (c *changingSink) Publish(ctx context.Context, batch []outbox.Record) []error {
	c.mu.Lock()
	s := c.sink
	c.mu.Unlock()
	return s.Publish(ctx, batch)
}
