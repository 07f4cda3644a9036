package cache_test

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/inboxtest"
	"github.com/commitbox/commitbox/internal/testenv"
)

// TestContract runs the suites that a cache of anybody's has to pass.
func TestContract(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	t.Run("cache", func(t *testing.T) {
		inboxtest.TestCache(t, func(t *testing.T) inbox.Cache { return open(t, client) })
	})
	t.Run("guard", func(t *testing.T) {
		inboxtest.TestGuard(t, func(t *testing.T) inbox.Guard { return open(t, client) })
	})
}

func TestPutAndGet(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	o := newCounts()
	c := open(t, client, observed(o))
	finished := time.UnixMicro(1_700_000_000_000_001)
	for name, entry := range map[string]inbox.CacheEntry{
		"all":              completed("result"),
		"no result":        {Fingerprint: []byte{1}, FinishedAt: finished},
		"no fingerprint":   {FinishedAt: finished, Result: []byte{1, 'x'}},
		"neither":          {FinishedAt: finished},
		"empty, not nil":   {Fingerprint: []byte{}, FinishedAt: finished, Result: []byte{}},
		"binary":           {Fingerprint: bytes.Repeat([]byte{0, 255}, 127), FinishedAt: finished, Result: bytes.Repeat([]byte{0, 13, 10, 255}, 5_000)},
		"the largest kept": {FinishedAt: finished, Result: make([]byte, 1<<20+1)},
	} {
		id := newID()
		wantMiss(t, c, here, id)
		must(t, c.Put(t.Context(), here, id, entry, time.Minute))
		t.Log(name)
		wantHit(t, c, id, entry)
	}
	if hits, misses := o.of(commitbox.CacheLookups, "test.cache", "hit"), o.of(commitbox.CacheLookups, "test.cache", "miss"); hits != 7 || misses != 7 {
		t.Errorf("counted %v hits and %v misses, want 7 each", hits, misses)
	}
}

// TestF7_TheEntryLivesAsLongAsItsRow shows that a copy gets what is left of the retention, and that nothing is kept of a
// row that has none left.
func TestF7_TheEntryLivesAsLongAsItsRow(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	c := open(t, client, prefix("f7"))
	id := newID()
	for _, ttl := range []time.Duration{0, -time.Hour, time.Microsecond} {
		must(t, c.Put(t.Context(), here, id, completed("x"), ttl))
		wantMiss(t, c, here, id)
	}
	must(t, c.Put(t.Context(), here, id, completed("x"), 90*time.Second))
	if left := client.PTTL(t.Context(), entryKey("f7", id)).Val(); left <= 60*time.Second || left > 90*time.Second {
		t.Errorf("the key lives for %v, want 90 s", left)
	}
	must(t, c.Put(t.Context(), here, id, completed("x"), 50*time.Millisecond))
	eventually(t, func() error {
		if _, found, err := c.Get(t.Context(), here, id); found || err != nil {
			return errors.Join(errors.New("it is still there"), err)
		}
		return nil
	})
}

func prefix(p string) func(*cache.Config) { return func(c *cache.Config) { c.Prefix = p } }

func entryKey(prefix string, id inbox.ID) string { return prefix + ":entry:{" + id.Key() + "}" }

// TestF8_AnotherHistoryIsAMiss compares every part of the identity.
func TestF8_AnotherHistoryIsAMiss(t *testing.T) {
	t.Parallel()
	o := newCounts()
	c := open(t, connect(t, testenv.Redis(t)), observed(o))
	id := newID()
	must(t, c.Put(t.Context(), here, id, completed("x"), time.Minute))
	others := []inbox.Identity{{}, {System: 8, Timeline: 1, Generation: 1}, {System: 7, Timeline: 2, Generation: 1}, {System: 7, Timeline: 1, Generation: 2}}
	for _, of := range others {
		wantMiss(t, c, of, id)
	}
	wantHit(t, c, id, completed("x"))
	if got := o.of(commitbox.CacheLookups, "test.cache", "stale"); got != float64(len(others)) {
		t.Errorf("counted %v as stale, want %d", got, len(others))
	}
}

// TestF29_WhatIsNotOursIsAMiss puts into Redis what somebody could who may write to it.
func TestF29_WhatIsNotOursIsAMiss(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	good := func(t *testing.T, o *counts, secrets ...[]byte) (c *cache.Cache, id inbox.ID, k string) {
		c = open(t, client, observed(o), prefix("f29"), func(c *cache.Config) { c.EntryMax = 4096; c.Secrets = append(secrets, c.Secrets...) })
		id = newID()
		must(t, c.Put(t.Context(), here, id, completed("paid"), time.Minute))
		return c, id, entryKey("f29", id)
	}
	value := func(t *testing.T, k string) []byte {
		b, err := client.Get(t.Context(), k).Bytes()
		must(t, err)
		return b
	}
	for _, c := range []struct {
		name, found string
		spoil       func(t *testing.T, k string) // of an id that is in the cache
	}{
		{"another type", "unreadable", func(t *testing.T, k string) {
			client.Del(t.Context(), k)
			must(t, client.LPush(t.Context(), k, "x").Err())
		}},
		{"garbage", "unreadable", func(t *testing.T, k string) { client.Set(t.Context(), k, "garbage", 0) }},
		{"another version", "unreadable", func(t *testing.T, k string) {
			b := value(t, k)
			b[0]++
			client.Set(t.Context(), k, b, 0)
		}},
		{"oversized", "oversized", func(t *testing.T, k string) { client.Set(t.Context(), k, make([]byte, 1<<20), 0) }},
		{"a copy of another key", "forged", func(t *testing.T, k string) {
			_, _, other := good(t, newCounts())
			client.Set(t.Context(), k, value(t, other), 0)
		}},
		{"another secret", "forged", func(t *testing.T, k string) {
			stranger, id, other := good(t, newCounts(), []byte("the secret of somebody else"))
			_ = stranger
			b := value(t, other)
			client.Set(t.Context(), k, b, 0)
			_ = id
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := newCounts()
			box, id, k := good(t, o)
			wantHit(t, box, id, completed("paid"))
			c.spoil(t, k)
			wantMiss(t, box, here, id)
			if o.of(commitbox.CacheLookups, "test.cache", c.found) != 1 {
				t.Errorf("it was not counted as %s: %v", c.found, o.total)
			}
			must(t, box.Put(t.Context(), here, id, completed("again"), time.Minute))
			wantHit(t, box, id, completed("again"))
		})
	}
	t.Run("any byte changed or cut off", func(t *testing.T) {
		box, id, k := good(t, newCounts())
		whole := value(t, k)
		for i := range whole {
			changed := bytes.Clone(whole)
			changed[i] ^= 1
			must(t, client.Set(t.Context(), k, changed, 0).Err())
			wantMiss(t, box, here, id)
			must(t, client.Set(t.Context(), k, whole[:i], 0).Err())
			wantMiss(t, box, here, id)
		}
		must(t, client.Set(t.Context(), k, whole, 0).Err())
		wantHit(t, box, id, completed("paid"))
	})
}

// TestF29_SecretsAreReplacedWithoutAGap walks through the steps that Config.Secrets describes.
func TestF29_SecretsAreReplacedWithoutAGap(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	before, after := []byte("the former secret"), []byte("the secret that follows")
	with := func(secrets ...[]byte) *cache.Cache {
		return open(t, client, prefix("rotation"), func(c *cache.Config) { c.Secrets = secrets })
	}
	steps := [][][]byte{{before}, {before, after}, {after, before}, {after}}
	for i, secrets := range steps[1:] {
		one, next := with(steps[i]...), with(secrets...)
		for _, pair := range [][2]*cache.Cache{{one, next}, {next, one}} {
			id := newID()
			must(t, pair[0].Put(t.Context(), here, id, completed("x"), time.Minute))
			wantHit(t, pair[1], id, completed("x"))
		}
	}
	id := newID()
	must(t, with(before).Put(t.Context(), here, id, completed("x"), time.Minute))
	wantMiss(t, with(after), here, id)
}

func TestTooLargeIsNotKept(t *testing.T) {
	t.Parallel()
	o := newCounts()
	c := open(t, connect(t, testenv.Redis(t)), observed(o), func(c *cache.Config) { c.EntryMax = 256 })
	id := newID()
	must(t, c.Put(t.Context(), here, id, completed(strings.Repeat("x", 300)), time.Minute))
	wantMiss(t, c, here, id)
	if o.of(commitbox.CacheErrors, "put", "too_large") != 1 {
		t.Errorf("it was not counted: %v", o.total)
	}
	var bad *commitbox.InputError
	if _, err := c.Finish(t.Context(), id, "token", completed(strings.Repeat("x", 300)), time.Minute); !errors.As(err, &bad) {
		t.Errorf("Finish says %v, want an InputError", err)
	}
}

func TestConfigNamesEveryBadField(t *testing.T) {
	t.Parallel()
	_, err := cache.New(nil, cache.Config{
		Secrets: [][]byte{[]byte("short")}, Prefix: "{x}", Timeout: -1, EntryMax: -1, FailuresMax: -1, OpenFor: -1,
	})
	for _, field := range []string{"client", "Secrets", "Prefix", "Timeout", "EntryMax", "FailuresMax", "OpenFor"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not named by %v", field, err)
		}
	}
	client := redis.NewClient(&redis.Options{})
	defer client.Close()
	if _, err := cache.New(client, cache.Config{}); err == nil || !strings.Contains(err.Error(), "Secrets") {
		t.Errorf("without a secret New says %v", err)
	}
	if _, err := cache.New(client, cache.Config{Secrets: [][]byte{secret}}); err != nil {
		t.Error(err)
	}
}

// TestCancelledCallerIsNotServed shows that a context that has ended is the caller's error, and not Redis's.
func TestCancelledCallerIsNotServed(t *testing.T) {
	t.Parallel()
	c := open(t, connect(t, testenv.Redis(t)))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, _, err := c.Get(ctx, here, newID())
	if !errors.Is(err, context.Canceled) || errors.Is(err, cache.ErrUnavailable) {
		t.Errorf("Get says %v", err)
	}
	if err := c.Put(ctx, here, newID(), completed("x"), time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("Put says %v", err)
	}
}

func guardKey(prefix string, id inbox.ID) string { return prefix + ":guard:{" + id.Key() + "}" }
