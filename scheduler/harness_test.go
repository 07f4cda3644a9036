package scheduler

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// yearly does not come by itself; tests make its ticks due.
const yearly = "0 0 1 1 *"

// quiet is a configuration for tests.
func quiet() Config {
	return Config{Lease: time.Second, Poll: 50 * time.Millisecond, Drain: time.Second, Grace: 100 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)}
}

// replica is a process of its own, stepped by hand.
func replica(t *testing.T, db *testenv.DB, cfg Config, jobs ...Job) *engine {
	t.Helper()
	s, err := New(db.Pool, jobs, cfg)
	if err != nil {
		t.Fatal(err)
	}
	e, err := s.open(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		e.end(errStopping)
		<-e.idle()
		e.close()
	})
	return e
}

// step looks once, or twice if the first look only made or ended something, and waits for the runs.
func (e *engine) step(t *testing.T) {
	t.Helper()
	for range 2 {
		if _, err := e.look(t.Context()); err != nil {
			t.Error(err)
		}
	}
	<-e.idle()
}

// running is a scheduler in its loop; stop ends it.
func running(t *testing.T, db *testenv.DB, cfg Config, jobs ...Job) (s *Scheduler, stop func() error) {
	t.Helper()
	s, err := New(db.Pool, jobs, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	t.Cleanup(func() { _ = stop() })
	return s, stop
}

// due makes the job's next tick due, some time ago.
func due(t *testing.T, db *testenv.DB, job string, ago time.Duration) {
	t.Helper()
	exec(t, db, `update commitbox.schedule_job set next_tick_at = clock_timestamp() - make_interval(secs => $2),
		due_at = clock_timestamp() - make_interval(secs => $2) where name = $1`, job, ago.Seconds())
}

func exec(t *testing.T, db *testenv.DB, sql string, args ...any) {
	t.Helper()
	tag, err := db.Pool.Exec(t.Context(), sql, args...)
	if err == nil && tag.Update() && tag.RowsAffected() == 0 {
		t.Fatalf("changes no row: %s", sql)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// statusOf returns a job's row.
func statusOf(t *testing.T, e *Scheduler, job string) Status {
	t.Helper()
	list, err := e.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list {
		if s.Name == job {
			return s
		}
	}
	return Status{} // it has no row yet
}

// eventually waits for a condition.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("did not come: %s", what)
		}
	}
}

// receive waits for a value, but not for ever.
func receive[T any](t *testing.T, what string, from <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-from:
	case <-time.After(20 * time.Second):
		t.Fatalf("did not come: %s", what)
	}
	return value
}

// counting is a job's function that counts.
func counting(n *atomic.Int64) func(context.Context, Tick) error {
	return func(context.Context, Tick) error {
		n.Add(1)
		return nil
	}
}

// counts is an observer that adds up by metric and labels.
type counts struct {
	mu sync.Mutex
	by map[string]float64
}

func (c *counts) Observe(m *commitbox.Metric, value float64, labels ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[string]float64{}
	}
	if len(labels) != len(m.Labels) {
		panic("labels")
	}
	key := m.Name
	for _, l := range labels {
		key += " " + l
	}
	c.by[key] += value
}

func (c *counts) get(key string) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.by[key]
}
