package rabbitmq

import (
	"context"
	"errors"
	"maps"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// shop is a database with a table of effects that nothing keeps unique, and what its consumer saw.
type shop struct {
	t    testing.TB
	pool *pgxpool.Pool
	box  *inbox.Box

	mu       sync.Mutex
	settled  map[string]int // by settlement
	failures []error
	seen     []Delivery
}

func newShop(t testing.TB) *shop {
	t.Helper()
	s := &shop{t: t, pool: testenv.Database(t).Pool, settled: map[string]int{}}
	if _, err := s.pool.Exec(t.Context(), `CREATE TABLE effect (message text)`); err != nil {
		t.Fatal(err)
	}
	s.box = s.newBox(s.pool, inbox.Config{})
	return s
}

func (s *shop) newBox(pool *pgxpool.Pool, cfg inbox.Config) *inbox.Box {
	s.t.Helper()
	if cfg.BackoffBase == 0 {
		cfg.BackoffBase, cfg.BackoffMax = 50*time.Millisecond, 200*time.Millisecond
	}
	box, err := inbox.New(pool, cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	return box
}

// Observe counts the settlements.
func (s *shop) Observe(m *commitbox.Metric, value float64, labels ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if m == commitbox.ConsumerMessages {
		s.settled[labels[1]] += int(value)
	}
}

func (s *shop) settlements() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.settled)
}

func (s *shop) onError(_ context.Context, _ Delivery, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failures = append(s.failures, err)
}

func (s *shop) failed(target error) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, err := range s.failures {
		if errors.Is(err, target) {
			return true
		}
	}
	return false
}

// record is a handler: it writes the effect and remembers the delivery.
func (s *shop) record(ctx context.Context, tx pgx.Tx, d Delivery) error {
	s.mu.Lock()
	s.seen = append(s.seen, d)
	s.mu.Unlock()
	_, err := tx.Exec(ctx, `INSERT INTO effect (message) VALUES ($1)`, d.ID.Message)
	return err
}

func (s *shop) deliveries() []Delivery {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]Delivery(nil), s.seen...)
}

func (s *shop) effects() (n int) {
	s.t.Helper()
	if err := s.pool.QueryRow(s.t.Context(), `SELECT count(*) FROM effect`).Scan(&n); err != nil {
		s.t.Fatal(err)
	}
	return n
}

// wantEffects checks that every message had one effect.
func (s *shop) wantEffects(sent []outbox.Record) {
	s.t.Helper()
	rows, err := s.pool.Query(s.t.Context(), `SELECT message, count(*) FROM effect GROUP BY message`)
	if err != nil {
		s.t.Fatal(err)
	}
	effects := map[string]int{}
	var id string
	var n int
	if _, err := pgx.ForEachRow(rows, []any{&id, &n}, func() error { effects[id] = n; return nil }); err != nil {
		s.t.Fatal(err)
	}
	for _, r := range sent {
		if n := effects[r.ID.String()]; n != 1 {
			s.t.Errorf("message %s: %d effects", r.ID, n)
		}
	}
	if len(effects) != len(sent) {
		s.t.Errorf("%d messages had an effect, %d were sent", len(effects), len(sent))
	}
}

type handlerFunc = func(ctx context.Context, tx pgx.Tx, d Delivery) error

// consume runs a consumer until the returned function or the end of the test stops it.
func (s *shop) consume(cfg ConsumerConfig, handler handlerFunc) (stop func() error) {
	s.t.Helper()
	if cfg.DeadLetterQueue == "" {
		cfg.DeadLetterByBroker = true
	}
	if cfg.DrainTimeout == 0 {
		cfg.DrainTimeout = patience
	}
	cfg.Observer, cfg.OnError = s, s.onError
	c, err := NewConsumer(s.box, cfg, handler)
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	s.t.Cleanup(func() { _ = stop() })
	return stop
}

// mustStop stops a consumer that has nothing left.
func mustStop(t testing.TB, stop func() error) {
	t.Helper()
	if err := stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
}

// finish stops a consumer and lets others take what it gave back, until the queue is empty.
func (s *shop) finish(b *broker, url, queue string, stop func() error) {
	s.t.Helper()
	mustStop(s.t, stop)
	for deadline := time.Now().Add(patience); b.depth(queue) > 0; mustStop(s.t, stop) {
		if time.Now().After(deadline) {
			s.t.Fatalf("%d messages are never settled", b.depth(queue))
		}
		stop = s.consume(ConsumerConfig{URL: url, Queue: queue}, s.record)
		eventually(s.t, "an empty queue", func() bool { return b.depth(queue) == 0 })
	}
}
