package cache_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var (
	secret = []byte("a secret of the tests, 32 bytes.")
	here   = inbox.Identity{System: 7, Timeline: 1, Generation: 1}
	// shortly is a budget that a busy machine keeps while Redis is well.
	shortly = 2 * time.Second
)

// newID returns an id that no other test uses.
func newID() inbox.ID { return inbox.ID{Consumer: "test.cache", Message: rand.Text()} }

// completed is a copy of a row.
func completed(result string) inbox.CacheEntry {
	return inbox.CacheEntry{Fingerprint: []byte{1, 2, 3}, FinishedAt: time.UnixMicro(1_700_000_000_123_456), Result: append([]byte{2}, result...)}
}

// connect returns a client of a single server, with the library's advice followed.
func connect(t testing.TB, url string, options ...func(*redis.Options)) *redis.Client {
	t.Helper()
	o, err := redis.ParseURL(url)
	must(t, err)
	o.ContextTimeoutEnabled, o.MaxRetries = true, -1
	for _, option := range options {
		option(o)
	}
	client := redis.NewClient(o)
	t.Cleanup(func() { must(t, client.Close()) })
	return client
}

// open returns a cache with a patient budget, unless an option says otherwise.
func open(t testing.TB, client redis.UniversalClient, options ...func(*cache.Config)) *cache.Cache {
	t.Helper()
	cfg := cache.Config{Secrets: [][]byte{secret}, Prefix: "test-" + rand.Text(), Timeout: shortly, Logger: quiet}
	for _, option := range options {
		option(&cfg)
	}
	c, err := cache.New(client, cfg)
	must(t, err)
	return c
}

var quiet = slog.New(slog.DiscardHandler)

func private(t testing.TB, args ...string) *devserver.Server {
	t.Helper()
	return testenv.PrivateRedis(t, devserver.RedisOptions{Args: args})
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantHit demands that an id is known with a result.
func wantHit(t testing.TB, c *cache.Cache, id inbox.ID, want inbox.CacheEntry) {
	t.Helper()
	got, found, err := c.Get(context.Background(), here, id)
	if err != nil || !found {
		t.Fatalf("found %v, %v; want a hit", found, err)
	}
	wantEntry(t, got, want)
}

func wantEntry(t testing.TB, got, want inbox.CacheEntry) {
	t.Helper()
	if !bytes.Equal(got.Fingerprint, want.Fingerprint) || (got.Fingerprint == nil) != (want.Fingerprint == nil) ||
		!bytes.Equal(got.Result, want.Result) || (got.Result == nil) != (want.Result == nil) || !got.FinishedAt.Equal(want.FinishedAt) {
		t.Fatalf("got %+v, want %+v", got, want)
	}
}

func wantMiss(t testing.TB, c *cache.Cache, of inbox.Identity, id inbox.ID) {
	t.Helper()
	if got, found, err := c.Get(context.Background(), of, id); err != nil || found {
		t.Fatalf("got %+v, found %v, %v; want a miss", got, found, err)
	}
}

func wantUnavailable(t testing.TB, err error) {
	t.Helper()
	if !errors.Is(err, cache.ErrUnavailable) {
		t.Fatalf("the error is %v, want ErrUnavailable", err)
	}
}

// eventually tries until do succeeds.
func eventually(t testing.TB, do func() error) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		err := do()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("it never came true: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// counts is an observer that adds up, by name and labels.
type counts struct {
	mu    sync.Mutex
	total map[string]float64
	last  map[string]float64
}

func newCounts() *counts { return &counts{total: map[string]float64{}, last: map[string]float64{}} }

func (c *counts) Observe(m *commitbox.Metric, value float64, labels ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	name := m.Name + " " + strings.Join(labels, " ")
	c.total[name] += value
	c.last[name] = value
}

func (c *counts) of(m *commitbox.Metric, labels ...string) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.total[m.Name+" "+strings.Join(labels, " ")]
}

func (c *counts) gauge(m *commitbox.Metric, labels ...string) float64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.last[m.Name+" "+strings.Join(labels, " ")]
}

func observed(o *counts) func(*cache.Config) { return func(c *cache.Config) { c.Observer = o } }
