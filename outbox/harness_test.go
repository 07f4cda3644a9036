package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// recorder is a publisher that keeps what it has confirmed, in order. fail decides what to answer; nil confirms.
type recorder struct {
	fail func(outbox.Record) error

	mu    sync.Mutex
	tried []outbox.Record
	sent  []outbox.Record
}

func (p *recorder) Publish(ctx context.Context, batch []outbox.Record) []error {
	p.mu.Lock()
	defer p.mu.Unlock()
	errs := make([]error, len(batch))
	for i, r := range batch {
		p.tried = append(p.tried, r)
		if p.fail != nil {
			errs[i] = p.fail(r)
		}
		if errs[i] == nil {
			p.sent = append(p.sent, r)
		}
	}
	return errs
}

// payloads lists what was confirmed, those of one key if it is given.
func (p *recorder) payloads(key ...string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return payloads(p.sent, key...)
}

func (p *recorder) attempts(key ...string) []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return payloads(p.tried, key...)
}

func payloads(records []outbox.Record, key ...string) []string {
	list := []string{}
	for _, r := range records {
		if len(key) == 0 || slices.Contains(key, r.Key) {
			list = append(list, string(r.Payload))
		}
	}
	return list
}

// brisk is a configuration for tests: short leases and delays.
func brisk() outbox.RelayConfig {
	return outbox.RelayConfig{
		Lease: 2 * time.Second, BackoffBase: 50 * time.Millisecond, BackoffMax: 200 * time.Millisecond, PollMax: 20 * time.Millisecond,
		Logger: slog.New(slog.DiscardHandler),
	}
}

func newRelay(t *testing.T, pool *pgxpool.Pool, p outbox.Publisher, cfg outbox.RelayConfig) *outbox.Relay {
	t.Helper()
	relay, err := outbox.NewRelay(pool, p, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return relay
}

// start runs a relay until stop is called or the test ends.
func start(t *testing.T, relay *outbox.Relay) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	stop = sync.OnceValue(func() error {
		cancel()
		select {
		case err := <-ended:
			return err
		case <-time.After(30 * time.Second):
			return errors.New("relay did not stop within 30 s")
		}
	})
	t.Cleanup(func() {
		if err := stop(); err != nil {
			t.Errorf("stop the relay: %v", err)
		}
	})
	return stop
}

func message(key, payload string) outbox.Message {
	return outbox.Message{Topic: "test", Key: key, Payload: []byte(payload)}
}

// enqueue stores messages in a transaction of their own.
func enqueue(t *testing.T, db *testenv.DB, messages ...outbox.Message) []uuid.UUID {
	t.Helper()
	var ids []uuid.UUID
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) (err error) {
		ids, err = outbox.Enqueue(t.Context(), tx, messages...)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return ids
}

// eventually waits until ok, for at most 20 s.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	eventuallyWithin(t, 20*time.Second, what, ok)
}

func eventuallyWithin(t *testing.T, bound time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(bound); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v for: %s", bound, what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// count asks one number of the database.
func count(t *testing.T, db *testenv.DB, sql string, args ...any) int {
	t.Helper()
	var n int
	if err := db.Pool.QueryRow(context.WithoutCancel(t.Context()), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// tables counts the messages in each state.
func tables(t *testing.T, db *testenv.DB) string {
	t.Helper()
	return fmt.Sprintf("hot %d, deferred %d, dead %d, blocked %d",
		count(t, db, "select count(*) from commitbox.outbox_message"), count(t, db, "select count(*) from commitbox.outbox_deferred"),
		count(t, db, "select count(*) from commitbox.outbox_dead"), count(t, db, "select count(*) from commitbox.outbox_blocked"))
}

const settled = "hot 0, deferred 0, dead 0, blocked 0"

// openPool opens another pool on the test's database, such as through a proxy.
func openPool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}
