package inbox_test

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// front is a Redis, and what the package keeps there.
type front struct {
	*cache.Cache
	client *redis.Client
	prefix string
	calls  atomic.Int64 // round trips
}

func (f *front) DialHook(next redis.DialHook) redis.DialHook { return next }

func (f *front) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		f.calls.Add(1)
		return next(ctx, cmd)
	}
}

func (f *front) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		f.calls.Add(1)
		return next(ctx, cmds)
	}
}

func newFront(t testing.TB, url string, options ...func(*cache.Config)) *front {
	t.Helper()
	o, err := redis.ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	o.ContextTimeoutEnabled, o.MaxRetries = true, -1
	f := &front{client: redis.NewClient(o), prefix: "test-" + rand.Text()}
	f.client.AddHook(f)
	t.Cleanup(func() { _ = f.client.Close() })
	cfg := frontConfig(f.prefix)
	for _, option := range options {
		option(&cfg)
	}
	f.Cache, err = cache.New(f.client, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func frontConfig(prefix string) cache.Config {
	return cache.Config{
		Secrets: [][]byte{[]byte("a secret of the tests, 32 bytes.")}, Prefix: prefix, Timeout: 2 * time.Second, OpenFor: 50 * time.Millisecond, Logger: quiet,
	}
}

// keys counts what is kept.
func (f *front) keys(t testing.TB) int {
	t.Helper()
	keys, err := f.client.Keys(context.Background(), f.prefix+"*").Result()
	if err != nil {
		t.Fatal(err)
	}
	return len(keys)
}

// clear removes what is kept.
func (f *front) clear(t testing.TB) {
	t.Helper()
	for _, key := range f.client.Keys(context.Background(), f.prefix+"*").Val() {
		f.client.Del(context.Background(), key)
	}
}

// guardedWorld is a world with policies, a Redis and a box that has both.
type guardedWorld struct {
	*world
	front    *front
	policies *inbox.Policies
	box      *inbox.Box
}

func newGuarded(t *testing.T, mode inbox.Mode) *guardedWorld {
	t.Helper()
	w := newWorld(t)
	return guard(w, newFront(t, testenv.Redis(t)), mode)
}

func guard(w *world, f *front, mode inbox.Mode) *guardedWorld {
	w.t.Helper()
	g := &guardedWorld{world: w, front: f, policies: w.policies(nil)}
	g.mode("c", mode, g.policies)
	w.exec(`select commitbox.inbox_policy_forget('c')`) // as if it had always been so
	w.load(g.policies)
	g.box = w.box(inbox.Config{Policies: g.policies, Cache: f, Guard: f})
	return g
}

func id(message string) inbox.ID { return inbox.ID{Consumer: "c", Message: message} }

// process runs a message whose handler returns a text, and says how it went.
func (g *guardedWorld) process(box *inbox.Box, message string) string {
	g.t.Helper()
	return g.deliver(box, inbox.Message{ID: id(message)})
}

func (g *guardedWorld) deliver(box *inbox.Box, m inbox.Message) string {
	g.t.Helper()
	res, err := inbox.Process(context.Background(), box, m, func(ctx context.Context, tx pgx.Tx) (string, error) {
		return "value of " + m.ID.Message, write(ctx, tx, m.ID, "done")
	})
	box.AwaitCopies()
	switch {
	case err != nil:
		return res.Outcome.String() + " by " + res.DecidedBy.String()
	case res.Value != "value of "+m.ID.Message:
		return fmt.Sprintf("%s with %q", res.Outcome, res.Value)
	}
	return res.Outcome.String() + " by " + res.DecidedBy.String()
}

func (g *guardedWorld) want(what, got, want string) {
	g.t.Helper()
	if got != want {
		g.t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// In mode double the row is always written, a duplicate is answered by Redis with the same value, in one round trip and
// no statement, and the result says who decided.
func TestB4_B10_ADuplicateIsAnsweredByTheCache(t *testing.T) {
	w := newWorld(t)
	var counter *testenv.WireCounter
	w.Pool, counter = w.CountedPool(t)
	g := guard(w, newFront(t, testenv.Redis(t)), inbox.ModeDouble)
	g.want("first", g.process(g.box, "m"), "executed by table")
	g.wantRow(id("m"), "completed", 1)
	g.want("second", g.process(g.box, "m"), "replayed by cache")
	var trips int64
	wire := counter.Measure(func() {
		before := g.front.calls.Load()
		g.want("third", g.process(g.box, "m"), "replayed by cache")
		trips = g.front.calls.Load() - before
	})
	if wire.Statements != 0 || wire.RoundTrips != 0 || trips != 1 {
		t.Errorf("%+v to PostgreSQL and %d round trips to Redis, want none and 1", wire, trips)
	}
	g.wantEffects(id("m"), 1)
}

// A copy with another fingerprint is confirmed by the table before it is called a mismatch.
func TestF9_AMismatchInTheCacheIsConfirmedByTheTable(t *testing.T) {
	g := newGuarded(t, inbox.ModeDouble)
	msg := func(payload string) inbox.Message {
		return inbox.Message{ID: id("m"), Fingerprint: inbox.FingerprintOf([]byte(payload))}
	}
	g.want("first", g.deliver(g.box, msg("a")), "executed by table")
	g.want("same", g.deliver(g.box, msg("a")), "replayed by cache")
	g.want("other", g.deliver(g.box, msg("b")), "mismatch by table")
	g.exec(`update commitbox.inbox set fingerprint = $1`, inbox.FingerprintOf([]byte("b")))
	g.want("the table knows better", g.deliver(g.box, msg("b")), "replayed by table")
}

// What is kept in Redis goes when the row's retention ends, counted from when it was finished.
func TestF7_ACopyLivesAsLongAsItsRow(t *testing.T) {
	g := newGuarded(t, inbox.ModeDouble)
	ttl := func() time.Duration {
		keys, err := g.front.client.Keys(t.Context(), g.front.prefix+"*").Result()
		if err != nil || len(keys) != 1 {
			t.Fatalf("keys %v, %v", keys, err)
		}
		left, err := g.front.client.TTL(t.Context(), keys[0]).Result()
		if err != nil {
			t.Fatal(err)
		}
		g.front.client.Del(t.Context(), keys[0])
		return left
	}
	const day = 24 * time.Hour
	g.process(g.box, "m")
	if left := ttl(); left > 7*day || left < 7*day-time.Minute {
		t.Errorf("after the commit: %s", left)
	}
	g.exec(`update commitbox.inbox set finished_at = finished_at - interval '6 days'`)
	g.want("a duplicate", g.process(g.box, "m"), "replayed by table")
	if left := ttl(); left > day || left < day-time.Minute {
		t.Errorf("filled by a duplicate: %s", left)
	}
	g.exec(`update commitbox.inbox set finished_at = finished_at - interval '2 days'`)
	g.want("past its retention", g.process(g.box, "m"), "replayed by table")
	if n := g.front.keys(t); n != 0 {
		t.Errorf("%d copies of a row that is past its retention", n)
	}
}

// Handle never fills with what it did; a duplicate does, if its transaction has written nothing.
func TestF7_P12_HandleFillsOnlyWithWhatIsCommitted(t *testing.T) {
	g := newGuarded(t, inbox.ModeDouble)
	handle := func(tx pgx.Tx) string {
		res, err := inbox.Handle(t.Context(), tx, id("m"), func(ctx context.Context) (int, error) { return 7, write(ctx, tx, id("m"), "") }, inbox.Using(g.box))
		if err != nil || res.Value != 7 {
			t.Fatalf("%+v %v", res, err)
		}
		return res.Outcome.String() + " by " + res.DecidedBy.String()
	}
	kept := func(what string, want int) {
		t.Helper()
		g.box.AwaitCopies()
		if n := g.front.keys(t); n != want {
			t.Errorf("%s: %d copies, want %d", what, n, want)
		}
	}
	tx := g.begin()
	g.want("first", handle(tx), "executed by table")
	g.want("again in its own transaction", handle(tx), "replayed by table") // what it reads is not committed
	kept("not committed", 0)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	tx = g.begin()
	g.want("after the rollback", handle(tx), "executed by table")
	g.commit(tx)
	kept("committed, but Handle does not know", 0)
	tx = g.begin()
	if err := write(t.Context(), tx, id("other"), ""); err != nil {
		t.Fatal(err)
	}
	g.want("in a transaction that has written", handle(tx), "replayed by table")
	kept("it may have written the row itself", 0)
	tx = g.begin()
	g.want("in a transaction that has not", handle(tx), "replayed by table")
	kept("now it is known", 1)
	g.want("and then", handle(g.begin()), "replayed by cache")
	g.wantEffects(id("m"), 1)
}

// The handler's commit is rolled back at each point: nothing is kept, and the message runs again.
func TestB48_P12_WhatIsRolledBackIsNeverCached(t *testing.T) {
	for mode, by := range map[inbox.Mode]string{inbox.ModePostgres: "table", inbox.ModeDouble: "table", inbox.ModeCache: "cache"} {
		t.Run(string(mode), func(t *testing.T) {
			g := newGuarded(t, mode)
			var cancel context.CancelFunc
			g.exec(`create table late (id text unique deferrable initially deferred); insert into late values ('taken')`)
			errNo := errors.New("no")
			for name, handler := range map[string]func(context.Context, pgx.Tx) error{
				"error": func(context.Context, pgx.Tx) error { return errNo },
				"panic": func(context.Context, pgx.Tx) error { panic(errNo) },
				"commit": func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `insert into late values ('taken')`)
					return err
				},
				"abort": func(ctx context.Context, tx pgx.Tx) error {
					_, _ = tx.Exec(ctx, `select 1/0`)
					return nil
				},
				"end of the goroutine": func(context.Context, pgx.Tx) error {
					runtime.Goexit()
					return nil
				},
				"cancelled": func(ctx context.Context, _ pgx.Tx) error {
					cancel()
					return ctx.Err()
				},
				"end of the session": func(ctx context.Context, tx pgx.Tx) error {
					_, err := tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
					return err
				},
			} {
				var ctx context.Context
				ctx, cancel = context.WithCancel(t.Context())
				err := errNo
				var call sync.WaitGroup
				call.Go(func() {
					_, err = inbox.Process(ctx, g.box, inbox.Message{ID: id(name)}, func(ctx context.Context, tx pgx.Tx) (string, error) {
						return "", errors.Join(write(ctx, tx, id(name), "lost"), handler(ctx, tx))
					})
				})
				call.Wait()
				cancel()
				if err == nil {
					t.Errorf("%s: no error", name)
				}
				g.box.AwaitCopies()
				if n := g.front.keys(t); n != 0 {
					t.Errorf("%s: %d keys", name, n)
				}
				g.makeDue(id(name))
				g.want(name+" again", g.process(g.box, name), "executed by "+by)
				g.front.clear(t)
				g.wantEffects(id(name), 1)
			}
		})
	}
}

// The answer to COMMIT is lost. What was rolled back runs again and is not cached before it is committed; what was committed
// does not run again.
func TestB48_P12_ALostCommitIsCachedOnceItIsFoundOut(t *testing.T) {
	w := newWorld(t)
	proxy := testenv.NewProxy(t, w.URL)
	g := guard(w, newFront(t, testenv.Redis(t)), inbox.ModeDouble)
	box, err := inbox.New(through(t, w, proxy), inbox.Config{Policies: g.policies, Cache: g.front, CommitWait: patience, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	for message, c := range map[string]struct {
		cut  func(string) <-chan struct{}
		runs int
	}{"committed": {proxy.CutAfter, 1}, "rolled back": {proxy.CutBefore, 2}} {
		runs := 0
		res, err := inbox.Process(t.Context(), box, inbox.Message{ID: id(message)}, func(ctx context.Context, tx pgx.Tx) (string, error) {
			if n := g.front.keys(t); n != 0 {
				t.Errorf("%s: %d keys while it runs", message, n)
			}
			if runs++; runs == 1 {
				c.cut(commitOnTheWire)
			}
			return "value of " + message, write(ctx, tx, id(message), "")
		})
		if err != nil || runs != c.runs || res.Replayed != (runs == 1) {
			t.Errorf("%s: %d runs, %+v %v", message, runs, res, err)
		}
		box.AwaitCopies()
		g.want(message, g.process(g.box, message), "replayed by cache")
		g.wantEffects(id(message), 1)
		g.front.clear(t)
	}
}

// Fifty wait for a copy whose caller goes away in the middle of the handler, and Redis goes away with it: one of them runs the
// handler, and the others get its answer.
func TestB47_OneWaiterTakesOverAndRedisGoesMeanwhile(t *testing.T) {
	w := newWorld(t)
	var counter *testenv.WireCounter
	w.Pool, counter = w.CountedPool(t)
	server := testenv.NewProxy(t, testenv.Redis(t))
	g := guard(w, newFront(t, server.URL(t, testenv.Redis(t))), inbox.ModeDouble)
	box := g.world.box(inbox.Config{Policies: g.policies, Cache: g.front, Wait: patience})
	leader, leave := context.WithCancel(t.Context())
	const n = 50
	var here, runs atomic.Int64
	wire := counter.Measure(func() {
		var group sync.WaitGroup
		begun := make(chan struct{})
		group.Go(func() {
			_, err := inbox.Process(leader, box, inbox.Message{ID: id("m")}, func(ctx context.Context, tx pgx.Tx) (string, error) {
				close(begun)
				<-ctx.Done()
				return "", ctx.Err()
			})
			if !errors.Is(err, inbox.ErrUnavailable) {
				t.Errorf("the leader: %v", err)
			}
		})
		<-begun
		for range n {
			group.Go(func() {
				here.Add(1)
				res, err := inbox.Process(context.Background(), box, inbox.Message{ID: id("m")}, func(ctx context.Context, tx pgx.Tx) (string, error) {
					runs.Add(1)
					return "value", write(ctx, tx, id("m"), "")
				})
				if err != nil || res.Value != "value" {
					t.Errorf("a waiter: %+v %v", res, err)
				}
			})
		}
		w.within(patience, "all wait", func() bool { return here.Load() == n })
		server.Refuse(true)
		server.Cut()
		leave()
		group.Wait()
	})
	if runs.Load() != 1 || wire.Statements > n {
		t.Errorf("%d runs and %d statements for %d waiters", runs.Load(), wire.Statements, n)
	}
	g.wantEffects(id("m"), 1)
}

// Redis away, and back: in mode double the table decides, and nothing is lost or doubled.
func TestB5_WithoutRedisTheTableDecides(t *testing.T) {
	w := newWorld(t)
	server := testenv.NewProxy(t, testenv.Redis(t))
	g := guard(w, newFront(t, server.URL(t, testenv.Redis(t))), inbox.ModeDouble)
	g.want("before", g.process(g.box, "a"), "executed by table")
	server.Refuse(true)
	server.Cut()
	for range 10 {
		g.want("a duplicate without Redis", g.process(g.box, "a"), "replayed by table")
	}
	g.want("a first delivery without Redis", g.process(g.box, "b"), "executed by table")
	server.Refuse(false)
	w.within(patience, "the cache is asked again", func() bool { return g.process(g.box, "b") == "replayed by cache" })
	g.wantEffects(id("a"), 1)
	g.wantEffects(id("b"), 1)
}

// Redis hangs: a call waits for it once, whether it handles, finds or leases the message, and not at all while the breaker is
// open.
func TestB5_AHungRedisCostsACallOneBudget(t *testing.T) {
	w := newWorld(t)
	server := testenv.NewProxy(t, testenv.Redis(t))
	seen := &counts{seen: map[string]float64{}}
	const budget = 100 * time.Millisecond
	g := guard(w, newFront(t, server.URL(t, testenv.Redis(t)), func(c *cache.Config) {
		c.Timeout, c.FailuresMax, c.OpenFor, c.Observer = budget, 4, time.Hour, seen
	}), inbox.ModeDouble)
	server.BlackHole(testenv.ToClient)
	handle := func() string {
		res, err := inbox.Handle(t.Context(), g.begin(), id("m"), func(context.Context) (string, error) { return "", errors.New("it runs again") }, inbox.Using(g.box))
		if err != nil {
			t.Error(err)
		}
		return res.Outcome.String() + " by " + res.DecidedBy.String()
	}
	acquire := func() string {
		_, err := g.box.Acquire(t.Context(), inbox.Message{ID: id("m")})
		var e *inbox.Error
		return fmt.Sprint(errors.As(err, &e) && e.Outcome == inbox.Replayed)
	}
	calls := []struct {
		want string
		call func() string
	}{
		{"executed by table", func() string { return g.process(g.box, "m") }},
		{"replayed by table", func() string { return g.process(g.box, "m") }},
		{"replayed by table", handle},
		{"true", acquire},
	}
	for n, c := range calls {
		g.want("while it is asked", c.call(), c.want)
		if asked := seen.seen["commitbox_cache_errors[get timeout]"]; asked != float64(n+1) || seen.seen["commitbox_cache_errors[put timeout]"] != 0 {
			t.Errorf("after %d calls: %v", n+1, seen.seen)
		}
	}
	calls[0].want = "replayed by table"
	for _, c := range calls {
		g.want("while it is left alone", c.call(), c.want)
	}
	if seen.seen["commitbox_cache_errors[get open]"] != 4 || seen.seen["commitbox_cache_errors[get timeout]"] != 4 {
		t.Errorf("counted %v", seen.seen)
	}
	g.wantEffects(id("m"), 1)
}

// A batch asks for all of its messages, and keeps copies of what it committed; a lease does as well.
func TestB4_BatchesAndLeasesAskAndFill(t *testing.T) {
	g := newGuarded(t, inbox.ModeDouble)
	msgs := []inbox.Message{{ID: id("a")}, {ID: id("b")}, {ID: id("c")}}
	batch := func() (by string) {
		for _, a := range inbox.ProcessBatch(t.Context(), g.box, msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]string, error) {
			values := make([]string, len(msgs))
			for i, m := range msgs {
				values[i] = m.ID.Message
				if err := write(ctx, tx, m.ID, ""); err != nil {
					return nil, err
				}
			}
			return values, nil
		}) {
			by += fmt.Sprintf("%s %s by %s, ", a.Value, a.Outcome, a.DecidedBy)
			if a.Err != nil {
				t.Error(a.Err)
			}
		}
		g.box.AwaitCopies()
		return by
	}
	g.want("first", batch(), "a executed by table, b executed by table, c executed by table, ")
	g.want("again", batch(), "a replayed by cache, b replayed by cache, c replayed by cache, ")
	leased := func(message string) string {
		res, err := inbox.ProcessLeased(t.Context(), g.box, inbox.Message{ID: id(message)}, func(ctx context.Context, lease *inbox.Lease) (int, error) {
			if message == "in" {
				return inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (int, error) { return 7, nil })
			}
			return 7, nil
		})
		if err != nil || res.Value != 7 {
			t.Errorf("%+v %v", res, err)
		}
		g.box.AwaitCopies()
		return res.Outcome.String() + " by " + res.DecidedBy.String()
	}
	for _, message := range []string{"alone", "in"} {
		g.want(message, leased(message), "executed by table")
		g.want(message+" again", leased(message), "replayed by cache")
	}
}
