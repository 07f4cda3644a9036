package cache_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
)

// The budget of tests in which Redis does not answer, and what a busy machine may add. Without a budget a call would take
// the client's 3 s.
const (
	briefly = 50 * time.Millisecond
	slack   = time.Second
)

func budget(d time.Duration) func(*cache.Config) { return func(c *cache.Config) { c.Timeout = d } }

// impatient is a cache that gives up after a short while and is ready again after another.
func impatient(c *cache.Config) { c.Timeout, c.OpenFor = briefly, 200*time.Millisecond }

// back waits until the cache works again, and returns an id that is in it.
func back(t testing.TB, c *cache.Cache) inbox.ID {
	t.Helper()
	id := newID()
	eventually(t, func() error { return c.Put(context.Background(), here, id, completed("back"), time.Minute) })
	eventually(t, func() error {
		if _, found, err := c.Get(context.Background(), here, id); err != nil || !found {
			return fmt.Errorf("found %v, %w", found, err)
		}
		return nil
	})
	return id
}

// TestB5_ADeadRedisIsAnErrorAndComesBackEmpty kills Redis and starts it again.
func TestB5_ADeadRedisIsAnErrorAndComesBackEmpty(t *testing.T) {
	t.Parallel()
	s := private(t)
	o := newCounts()
	c := open(t, connect(t, s.URL()), impatient, observed(o))
	known := back(t, c)
	must(t, s.Kill())
	for range 10 {
		_, _, err := c.Get(t.Context(), here, known)
		wantUnavailable(t, err)
		wantUnavailable(t, c.Put(t.Context(), here, known, completed("x"), time.Minute))
		_, _, _, err = c.Begin(t.Context(), known, "a", time.Minute)
		wantUnavailable(t, err)
	}
	if o.gauge(commitbox.CacheBreakerOpen, "cache") != 1 {
		t.Error("the breaker is not open")
	}
	must(t, s.Restart(t.Context()))
	back(t, c)
	wantMiss(t, c, here, known)
	if o.gauge(commitbox.CacheBreakerOpen, "cache") != 0 {
		t.Error("the breaker is still open")
	}
}

// TestB5_AHungRedisCostsTheBudgetUntilTheBreakerOpens freezes Redis, under a client that keeps deadlines and under one
// that does not.
func TestB5_AHungRedisCostsTheBudgetUntilTheBreakerOpens(t *testing.T) {
	t.Parallel()
	for _, keeps := range []bool{true, false} {
		t.Run(fmt.Sprintf("ContextTimeoutEnabled %v", keeps), func(t *testing.T) {
			t.Parallel()
			s := private(t)
			o := newCounts()
			client := connect(t, s.URL(), func(o *redis.Options) { o.ContextTimeoutEnabled = keeps })
			c := open(t, client, impatient, observed(o), func(c *cache.Config) { c.OpenFor = time.Minute })
			id := back(t, c)
			before := o.of(commitbox.CacheErrors, "get", "timeout")
			must(t, s.Pause())
			for i := range 5 {
				began := time.Now()
				_, _, err := c.Get(t.Context(), here, id)
				wantUnavailable(t, err)
				if took := time.Since(began); took < briefly/2 || took > briefly+slack {
					t.Errorf("call %d took %v", i, took)
				}
			}
			const n = 1000
			began := time.Now()
			for range n {
				_, _, err := c.Get(t.Context(), here, id)
				wantUnavailable(t, err)
			}
			if each := time.Since(began) / n; each > time.Millisecond {
				t.Errorf("a call takes %v while the breaker is open", each)
			}
			if open, timeouts := o.of(commitbox.CacheErrors, "get", "open"), o.of(commitbox.CacheErrors, "get", "timeout")-before; open != n || timeouts != 5 {
				t.Errorf("counted %v calls that were not made and %v time-outs", open, timeouts)
			}
			must(t, s.Resume())
		})
	}
}

// TestTheBudgetOfACallIs20Milliseconds has a cache whose Timeout was not set.
func TestTheBudgetOfACallIs20Milliseconds(t *testing.T) {
	t.Parallel()
	s := private(t)
	c := open(t, connect(t, s.URL()), budget(0))
	_ = back(t, c)
	must(t, s.Pause())
	began := time.Now()
	_, _, err := c.Get(t.Context(), here, newID())
	took := time.Since(began)
	must(t, s.Resume())
	wantUnavailable(t, err)
	if took < 20*time.Millisecond || took > 20*time.Millisecond+slack {
		t.Errorf("a call that is not answered took %v", took)
	}
}

// TestTheBudgetBoundsDialsAndThePool lets many callers want the one connection that is not there.
func TestTheBudgetBoundsDialsAndThePool(t *testing.T) {
	t.Parallel()
	s := private(t)
	must(t, s.Pause())
	c := open(t, connect(t, s.URL(), func(o *redis.Options) { o.PoolSize = 1 }), impatient, func(c *cache.Config) { c.FailuresMax = 1000 })
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			began := time.Now()
			_, _, err := c.Get(context.Background(), here, newID())
			if took := time.Since(began); !errors.Is(err, cache.ErrUnavailable) || took > briefly+slack {
				t.Errorf("%v after %v", err, took)
			}
		})
	}
	all.Wait()
	must(t, s.Resume())
}

// TestB5_OneCallTriesForAll looks at a breaker whose pause is over while Redis is still away.
func TestB5_OneCallTriesForAll(t *testing.T) {
	t.Parallel()
	s := private(t)
	o := newCounts()
	c := open(t, connect(t, s.URL()), observed(o), budget(500*time.Millisecond), func(c *cache.Config) { c.OpenFor, c.FailuresMax = 10*time.Millisecond, 1 })
	back(t, c)
	before := o.of(commitbox.CacheErrors, "get", "timeout")
	must(t, s.Pause())
	_, _, err := c.Get(t.Context(), here, newID())
	wantUnavailable(t, err)
	time.Sleep(20 * time.Millisecond)
	var all sync.WaitGroup
	for range 100 {
		all.Go(func() {
			_, _, err := c.Get(context.Background(), here, newID())
			if !errors.Is(err, cache.ErrUnavailable) {
				t.Errorf("%v", err)
			}
		})
	}
	all.Wait()
	if tries := o.of(commitbox.CacheErrors, "get", "timeout") - before; tries > 4 {
		t.Errorf("%v calls were made while one would do", tries)
	}
	must(t, s.Resume())
	back(t, c)
}

func TestB5_APauseOfClientsPasses(t *testing.T) {
	t.Parallel()
	s := private(t)
	client := connect(t, s.URL())
	c := open(t, client, impatient)
	id := back(t, c)
	must(t, client.Do(t.Context(), "CLIENT", "PAUSE", 700, "ALL").Err())
	began := time.Now()
	_, _, err := c.Get(t.Context(), here, id)
	wantUnavailable(t, err)
	if took := time.Since(began); took > briefly+slack {
		t.Errorf("it took %v", took)
	}
	back(t, c)
	wantHit(t, c, id, completed("back"))
}

// fill writes until a server of 3 MB is full.
func fill(t testing.TB, client *redis.Client) {
	t.Helper()
	for i := range 3000 {
		if err := client.Set(context.Background(), fmt.Sprintf("fill-%d", i), make([]byte, 2000), 0).Err(); err != nil {
			if !strings.HasPrefix(err.Error(), "OOM") {
				t.Fatal(err)
			}
			return
		}
	}
}

// TestB45_EvictedEntriesAreMisses runs on a server that drops what was not used lately, and says so in the log.
func TestB45_EvictedEntriesAreMisses(t *testing.T) {
	t.Parallel()
	s := private(t, "--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
	client := connect(t, s.URL())
	var lines lockedBuffer
	c := open(t, client, func(c *cache.Config) { c.Logger = slog.New(slog.NewTextHandler(&lines, nil)) })
	ids := make([]inbox.ID, 50)
	for i := range ids {
		ids[i] = newID()
		must(t, c.Put(t.Context(), here, ids[i], completed(ids[i].Message), time.Minute))
	}
	fill(t, client)
	evicted := 0
	for _, id := range ids {
		entry, found, err := c.Get(t.Context(), here, id)
		must(t, err)
		if !found {
			evicted++
			continue
		}
		wantEntry(t, entry, completed(id.Message))
	}
	if evicted == 0 {
		t.Error("nothing was evicted, so nothing was tested")
	}
	take(t, c, newID(), "a", inbox.GuardGranted)
	eventually(t, func() error {
		if !strings.Contains(lines.String(), "allkeys-lru") {
			return errors.New("the log does not warn of eviction")
		}
		return nil
	})
}

// TestB45_AFullRedisIsNoLockAndNoMark runs on a server that takes nothing more: what it knows is still read.
func TestB45_AFullRedisIsNoLockAndNoMark(t *testing.T) {
	t.Parallel()
	s := private(t, "--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
	client := connect(t, s.URL())
	o := newCounts()
	var lines lockedBuffer
	c := open(t, client, observed(o), func(c *cache.Config) { c.Logger = slog.New(slog.NewTextHandler(&lines, nil)) })
	id := back(t, c)
	fill(t, client)
	for range 10 {
		wantUnavailable(t, c.Put(t.Context(), here, newID(), completed(strings.Repeat("x", 10_000)), time.Minute))
		_, _, _, err := c.Begin(t.Context(), newID(), "a", time.Minute)
		wantUnavailable(t, err)
	}
	wantHit(t, c, id, completed("back"))
	_, err := newLocker(t, client, cache.LockConfig{Timeout: 2 * time.Second}).Acquire(t.Context(), "full")
	wantUnavailable(t, err)
	if o.of(commitbox.CacheErrors, "put", "write_refused") != 10 || o.gauge(commitbox.CacheBreakerOpen, "cache") != 0 {
		t.Errorf("counted %v", o.total)
	}
	if strings.Contains(lines.String(), "may evict") {
		t.Error("the log warns of eviction")
	}
}

// TestFlushesLoseNothingButSpeed empties Redis all the time under load.
func TestFlushesLoseNothingButSpeed(t *testing.T) {
	t.Parallel()
	s := private(t)
	client := connect(t, s.URL())
	c := open(t, client)
	stop := make(chan struct{})
	var flusher sync.WaitGroup
	flusher.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(100 * time.Millisecond):
				client.FlushAll(context.Background())
			}
		}
	})
	hits := 0
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		id := newID()
		must(t, c.Put(t.Context(), here, id, completed(id.Message), time.Minute))
		entry, found, err := c.Get(t.Context(), here, id)
		must(t, err)
		if found {
			hits++
			wantEntry(t, entry, completed(id.Message))
		}
		wantMiss(t, c, here, newID())
	}
	close(stop)
	flusher.Wait()
	if hits == 0 {
		t.Error("nothing was found in a second")
	}
}

// TestB5_AReplicaAnswersReadsOnly asks a server that takes no writes.
func TestB5_AReplicaAnswersReadsOnly(t *testing.T) {
	t.Parallel()
	master := private(t)
	_, port, _ := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(master.URL(), "redis://"), "/0"), ":")
	replica := private(t, "--replicaof", "127.0.0.1", port)
	o := newCounts()
	writer := open(t, connect(t, master.URL()), prefix("replica"))
	c := open(t, connect(t, replica.URL()), prefix("replica"), observed(o))
	id := back(t, writer)
	eventually(t, func() error {
		if _, found, err := c.Get(t.Context(), here, id); err != nil || !found {
			return fmt.Errorf("found %v, %w", found, err)
		}
		return nil
	})
	for range 10 {
		wantUnavailable(t, c.Put(t.Context(), here, newID(), completed("x"), time.Minute))
		_, _, _, err := c.Begin(t.Context(), newID(), "a", time.Minute)
		wantUnavailable(t, err)
		wantHit(t, c, id, completed("back"))
	}
	if o.of(commitbox.CacheErrors, "put", "write_refused") != 10 {
		t.Errorf("counted %v", o.total)
	}
}

// TestB5_ARedisThatLoadsIsAway asks a server that reads its file.
func TestB5_ARedisThatLoadsIsAway(t *testing.T) {
	t.Parallel()
	s := private(t, "--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
	client := connect(t, s.URL())
	o := newCounts()
	c := open(t, client, observed(o), func(c *cache.Config) { c.FailuresMax = 1_000_000 })
	id := newID()
	must(t, c.Put(t.Context(), here, id, completed("kept"), time.Hour))
	pipe := client.Pipeline()
	for i := range 1500 {
		pipe.Set(t.Context(), fmt.Sprint("key-", i), make([]byte, 100), 0)
	}
	_, err := pipe.Exec(t.Context())
	must(t, err)
	must(t, client.Save(t.Context()).Err())
	must(t, s.Kill())
	restarted := make(chan error, 1)
	go func() { restarted <- s.Restart(context.Background()) }()
	eventually(t, func() error {
		if _, _, err := c.Get(t.Context(), here, id); err != nil && !errors.Is(err, cache.ErrUnavailable) {
			t.Fatal(err)
		}
		if o.of(commitbox.CacheErrors, "get", "not_ready") == 0 {
			return fmt.Errorf("it did not say LOADING yet: %v", o.total)
		}
		return nil
	})
	must(t, <-restarted)
	eventually(t, func() error { _, _, err := c.Get(t.Context(), here, id); return err })
	wantHit(t, c, id, completed("kept"))
}

// TestFaultsOfTheSetUpAreNoOutage shows what is not to be degraded on.
func TestFaultsOfTheSetUpAreNoOutage(t *testing.T) {
	t.Parallel()
	s := private(t)
	must(t, connect(t, s.URL()).ConfigSet(t.Context(), "requirepass", "right").Err())
	o := newCounts()
	c := open(t, connect(t, s.URL()), observed(o), func(c *cache.Config) { c.FailuresMax = 2 })
	for range 5 {
		_, _, err := c.Get(t.Context(), here, newID())
		if err == nil || errors.Is(err, cache.ErrUnavailable) || !strings.Contains(err.Error(), "NOAUTH") {
			t.Fatalf("Get without the password says %v", err)
		}
	}
	if o.of(commitbox.CacheErrors, "get", "refused") != 5 {
		t.Errorf("counted %v", o.total)
	}
}

// TestTheLogIsBounded lets calls fail a thousand times.
func TestTheLogIsBounded(t *testing.T) {
	t.Parallel()
	s := private(t)
	client := connect(t, s.URL())
	var lines lockedBuffer
	c := open(t, client, prefix("log"), impatient, func(c *cache.Config) { c.Logger = slog.New(slog.NewTextHandler(&lines, nil)) })
	id := newID()
	must(t, client.Set(t.Context(), entryKey("log", id), "garbage", 0).Err())
	for range 500 {
		_, _, _ = c.Get(t.Context(), here, id)
	}
	must(t, s.Kill())
	for range 500 {
		_, _, _ = c.Get(t.Context(), here, id)
	}
	if n := strings.Count(lines.String(), "\n"); n < 2 || n > 8 {
		t.Errorf("%d lines:\n%s", n, &lines)
	}
	if !strings.Contains(lines.String(), id.Message) || !strings.Contains(lines.String(), "redis is away") {
		t.Errorf("the log does not name what happened:\n%s", &lines)
	}
}

// lockedBuffer takes the lines of several goroutines.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// A copy for which nobody waits is given up within the budget, though the client heeds no deadline, and counts for the breaker.
func TestB5_ACopyIsGivenUpWithinTheBudget(t *testing.T) {
	t.Parallel()
	s := private(t)
	client := connect(t, s.URL(), func(o *redis.Options) { o.ContextTimeoutEnabled = false })
	c := open(t, client, impatient, func(c *cache.Config) { c.OpenFor = time.Minute })
	id := back(t, c)
	must(t, s.Pause())
	for i := range 6 { // the last one finds the breaker open
		began, done := time.Now(), make(chan time.Duration)
		c.PutLater(here, id, completed("x"), time.Minute, func() { go func() { done <- time.Since(began) }() })
		if took := <-done; took > briefly+slack || i == 5 && took > briefly/2 {
			t.Errorf("copy %d took %v", i, took)
		}
	}
}
