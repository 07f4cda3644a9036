package cache

import (
	"context"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox"
)

// store makes calls to Redis that are bounded in time, whatever the client's own settings are.
type store struct {
	name     string // label of its breaker: cache or lock
	client   redis.UniversalClient
	reads    *line
	writes   *line // its own, because a refused write makes the client repeat its whole pipeline
	timeout  time.Duration
	breaker  *breaker
	observer commitbox.Observer
	logger   *slog.Logger
	throttle throttle
	eviction sync.Once
}

// newStore returns a store with a closed breaker.
func newStore(name string, client redis.UniversalClient, timeout time.Duration, b *breaker, o commitbox.Observer, l *slog.Logger) *store {
	if !keepsDeadlines(client) {
		l.Warn("cache: the redis client has ContextTimeoutEnabled off, so a call that redis does not answer keeps its connection for the whole ReadTimeout")
	}
	return &store{name: name, client: client, reads: newLine(client, timeout, 0), writes: newLine(client, timeout, min(gatherFor, timeout/4)), timeout: timeout, breaker: b, observer: o, logger: l}
}

// keepsDeadlines is true of clients that it does not know.
func keepsDeadlines(client redis.UniversalClient) bool {
	switch c := client.(type) {
	case *redis.Client:
		return c.Options().ContextTimeoutEnabled
	case *redis.ClusterClient:
		return c.Options().ContextTimeoutEnabled
	case *redis.Ring:
		return c.Options().ContextTimeoutEnabled
	}
	return true
}

// call is one call on its way. It belongs to no caller: those who wait may go, the others still get its outcome. It is
// settled within the store's time budget, even if no answer comes: the connection that waits for it may heed no deadline.
// What was sent may still take effect later.
type call[T any] struct {
	store     *store
	operation string
	began     time.Time
	probe     bool
	timer     *time.Timer
	once      sync.Once
	done      chan struct{}
	value     T
	err       error

	mu    sync.Mutex
	after func() // called once it is settled
}

// newCall returns a call that may be made, or one that is settled because it may not.
func newCall[T any](s *store, operation string) *call[T] {
	c := &call[T]{store: s, operation: operation, began: time.Now(), done: make(chan struct{})}
	var none T
	admitted, probe := s.breaker.admit(c.began)
	if c.probe = probe; !admitted {
		c.settle(none, errOpen)
		return c
	}
	c.timer = time.AfterFunc(s.timeout, func() { c.settle(none, errBudget) })
	return c
}

func (c *call[T]) settle(value T, err error) {
	c.once.Do(func() {
		c.value, c.err = value, c.store.judge(c.operation, c.began, c.probe, err)
		c.mu.Lock()
		close(c.done)
		after := c.after
		c.mu.Unlock()
		if after != nil {
			after()
		}
	})
}

// then has f called once the call is settled, for a caller who does not wait.
func (c *call[T]) then(f func()) {
	c.mu.Lock()
	settled := c.settled()
	if !settled {
		c.after = f
	}
	c.mu.Unlock()
	if settled {
		f()
	}
}

// end settles a call that has its answer.
func (c *call[T]) end(value T, err error) {
	c.timer.Stop()
	c.settle(value, err)
}

// start makes a call in a goroutine of its own.
func start[T any](ctx context.Context, s *store, operation string, f func(context.Context) (T, error)) *call[T] {
	c := newCall[T](s, operation)
	if c.settled() {
		return c
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.timeout)
	go func() {
		defer cancel()
		c.end(f(ctx))
	}()
	return c
}

// send makes a call of one command of so many bytes, which goes with those of other callers. read makes the outcome of its
// answer.
func send[T any](s *store, l *line, operation string, command redis.Cmder, bytes int, read func(error) (T, error)) *call[T] {
	c := newCall[T](s, operation)
	if !c.settled() {
		l.add(passenger{command, bytes, c.began.Add(s.timeout), func() { c.end(read(command.Err())) }})
	}
	return c
}

// wait returns the outcome, or ctx's error if that ends first.
func (c *call[T]) wait(ctx context.Context) (value T, err error) {
	select {
	case <-c.done:
		return c.value, c.err
	default:
	}
	select {
	case <-c.done:
		return c.value, c.err
	case <-ctx.Done():
		return value, ctx.Err()
	}
}

func (c *call[T]) settled() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// do makes a call and waits for it.
func do[T any](ctx context.Context, s *store, operation string, f func(context.Context) (T, error)) (value T, err error) {
	if err := ctx.Err(); err != nil {
		return value, err
	}
	return start(ctx, s, operation, f).wait(ctx)
}

// judge reports a call's end, and returns its error as callers see it.
func (s *store) judge(operation string, began time.Time, probe bool, err error) error {
	f := classify(err)
	if f != noFault {
		s.observer.Observe(commitbox.CacheErrors, 1, operation, string(f))
	}
	err = explain(operation, f, err)
	if f == breakerOpen {
		return err
	}
	now := time.Now()
	s.observer.Observe(commitbox.CacheSeconds, now.Sub(began).Seconds(), operation)
	switch opened, closed := s.breaker.tell(now, probe, f.away()); {
	case opened:
		s.observer.Observe(commitbox.CacheBreakerOpen, 1, s.name)
		s.logger.Warn("cache: redis is away, it is left alone for a while", "store", s.name, "error", err, "retry_in", s.breaker.pause)
	case closed:
		s.observer.Observe(commitbox.CacheBreakerOpen, 0, s.name)
		s.logger.Info("cache: redis is back", "store", s.name)
	case f != noFault:
		s.warn("cache: a call to redis failed", "operation", operation, "error", err)
	}
	return err
}

// warn logs, but not more than once in a while.
func (s *store) warn(message string, args ...any) {
	if dropped, ok := s.throttle.pass(time.Now()); ok {
		s.logger.Warn(message, append(args, "dropped", dropped)...) //nolint:sloglint // the callers' messages are constants
	}
}

// warnOfEviction looks once at what the server does when its memory is full. Whoever holds something by a token loses it
// to any policy but noeviction. Nobody waits for the answer.
func (s *store) warnOfEviction(ctx context.Context) {
	s.eviction.Do(func() {
		start(ctx, s, "info", func(ctx context.Context) (struct{}, error) {
			memory, err := s.client.Info(ctx, "memory").Result()
			if policy := evicts(memory); policy != "" {
				s.logger.Warn("cache: redis may evict the tokens that locks and mode cache rest on, use maxmemory-policy noeviction", "maxmemory_policy", policy)
			}
			return struct{}{}, err
		})
	})
}

// evicts returns the policy of a server that drops keys, "" of one that does not.
func evicts(memory string) string {
	field := map[string]string{}
	for line := range strings.Lines(memory) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		field[name] = value
	}
	if policy := field["maxmemory_policy"]; field["maxmemory"] != "0" && policy != "noeviction" {
		return policy
	}
	return ""
}

// throttle lets one event pass in each period.
type throttle struct {
	mu      sync.Mutex
	next    time.Time
	dropped int
}

const throttlePeriod = 10 * time.Second

// pass says whether an event may pass, and how many did not since the last one that did.
func (t *throttle) pass(now time.Time) (dropped int, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now.Before(t.next) {
		t.dropped++
		return 0, false
	}
	dropped, t.dropped, t.next = t.dropped, 0, now.Add(throttlePeriod)
	return dropped, true
}
