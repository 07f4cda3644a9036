package bench

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
)

// BenchmarkCacheHung measures what a look-up costs while Redis is frozen: the time budget until the breaker opens, then
// next to nothing. The client is set up as package cache advises, or with go-redis's defaults.
func BenchmarkCacheHung(b *testing.B) {
	n := sized(1_000, 20_000, 100_000)
	r := &report{b: b, title: "Cache: Redis is frozen (SIGSTOP)", facts: []string{
		fmt.Sprintf("%d look-ups one after the other once the breaker is open, %d rounds; budget 20 ms, breaker after 5 calls", n, rounds(b)),
		fmt.Sprintf("%s, %d cores for client and server", runtime.Version(), runtime.NumCPU()),
	}}
	for _, advised := range []bool{true, false} {
		var closed, slowest, open, worst []float64
		for range rounds(b) {
			before, after := lookUpFrozen(b, advised, n)
			closed = append(closed, quantile(before, 0.5))
			slowest = append(slowest, slices.Max(before))
			open = append(open, quantile(after, 0.5))
			worst = append(worst, quantile(after, 0.999))
		}
		name := fmt.Sprintf("ContextTimeoutEnabled %v, ", advised)
		r.atMost(name+"call before it opens, p50, ms", quantile(closed, 0.5), 21)
		r.noted(name+"slowest call before it opens, ms", slices.Max(slowest))
		r.atMost(name+"call while it is open, p50, ms", quantile(open, 0.5), 1)
		r.atMost(name+"call while it is open, p99.9, ms", quantile(worst, 0.5), 1)
	}
	r.print()
}

// lookUpFrozen returns the milliseconds of the calls that open the breaker, and of n calls after them.
func lookUpFrozen(b *testing.B, advised bool, n int) (before, after []float64) {
	b.Helper()
	s := testenv.PrivateRedis(b, devserver.RedisOptions{})
	o, err := redis.ParseURL(s.URL())
	if err != nil {
		b.Fatal(err)
	}
	o.ContextTimeoutEnabled = advised
	client := redis.NewClient(o)
	b.Cleanup(func() { _ = client.Close() })
	c, err := cache.New(client, cache.Config{Secrets: [][]byte{payload[:32]}, OpenFor: time.Hour, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		b.Fatal(err)
	}
	if _, _, err := c.Get(b.Context(), inbox.Identity{}, inbox.ID{}); err != nil {
		b.Fatal(err)
	}
	if err := s.Pause(); err != nil {
		b.Fatal(err)
	}
	call := func() float64 {
		began := time.Now()
		_, _, err := c.Get(b.Context(), inbox.Identity{}, inbox.ID{Consumer: consumer, Message: "frozen"})
		if !errors.Is(err, cache.ErrUnavailable) {
			b.Fatalf("a frozen redis answers %v", err)
		}
		return float64(time.Since(began)) / float64(time.Millisecond)
	}
	for range 5 {
		before = append(before, call())
	}
	for range n {
		after = append(after, call())
	}
	if err := s.Resume(); err != nil {
		b.Fatal(err)
	}
	return before, after
}
