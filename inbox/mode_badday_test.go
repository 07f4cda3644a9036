package inbox_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
)

// badDay is a Redis of a test's own, to which something happens while messages are delivered.
type badDay struct {
	*guardedWorld
	server  *devserver.Server
	over    chan struct{}
	running sync.WaitGroup
}

func (d *badDay) redis(args ...any) {
	if err := d.front.client.Do(context.Background(), args...).Err(); err != nil {
		d.t.Error(err)
	}
}

// all lets something happen again and again, until the day is over.
func (d *badDay) all(every time.Duration, happen func()) {
	d.running.Go(func() {
		for {
			happen()
			select {
			case <-d.over:
				return
			case <-time.After(every):
			}
		}
	})
}

// fill writes what takes the memory of 3 MB.
func (d *badDay) fill() {
	for i := range 2000 {
		d.front.client.Set(context.Background(), fmt.Sprint("fill ", i), strings.Repeat("x", 2000), 0)
	}
}

func (d *badDay) entry(message string) string {
	return d.front.prefix + ":entry:{" + id(message).Key() + "}"
}

const badDayMessages = 24

func badMessage(n int) string { return fmt.Sprint("message ", n) }

// forge puts values under the keys of messages that have not come yet.
func (d *badDay) forge() {
	ctx, client := context.Background(), d.front.client
	copied := client.Get(ctx, d.entry("before")).Val()
	if copied == "" {
		d.t.Error("there is no entry to copy")
	}
	changed := copied[:len(copied)-1] + "!"
	for n := range badDayMessages {
		key := d.entry(badMessage(n))
		switch n % 6 {
		case 0:
			client.Set(ctx, key, copied, time.Hour) // signed, for another message
		case 1:
			client.Set(ctx, key, changed, time.Hour)
		case 2:
			client.Set(ctx, key, "garbage", 0)
		case 3:
			client.LPush(ctx, key, copied)
		case 4:
			client.Set(ctx, key, copied+strings.Repeat("x", 2<<20), time.Hour)
		case 5:
			client.Set(ctx, key, copied[:20], time.Hour)
		}
	}
}

// Whatever happens to Redis, in mode double each message has its effect once, and every copy is handled or answered: none is
// refused, and none waits for longer than the budget.
func TestB5_P12_OnBadDaysOfRedisEachMessageHasOneEffect(t *testing.T) {
	full := []string{"--maxmemory", "3mb", "--maxmemory-policy"}
	for name, day := range map[string]struct {
		args []string
		come func(*badDay)
	}{
		"stopped":        {nil, func(d *badDay) { d.must(d.server.Pause()) }},
		"killed":         {nil, func(d *badDay) { d.must(d.server.Kill()) }},
		"starts empty":   {nil, func(d *badDay) { d.must(d.server.Kill()); d.must(d.server.Restart(context.Background())) }},
		"clients paused": {nil, func(d *badDay) { d.redis("CLIENT", "PAUSE", 300, "ALL") }},
		"full":           {append(full, "noeviction"), func(d *badDay) { d.fill() }},
		"evicts":         {append(full, "allkeys-lru"), func(d *badDay) { d.all(time.Millisecond, d.fill) }},
		"flushed":        {nil, func(d *badDay) { d.all(100*time.Millisecond, func() { d.redis("FLUSHALL") }) }},
		"read-only":      {nil, func(d *badDay) { d.redis("REPLICAOF", "127.0.0.1", "1") }},
		"forged":         {nil, func(d *badDay) { d.forge() }},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			server := testenv.PrivateRedis(t, devserver.RedisOptions{Args: day.args})
			front := newFront(t, server.URL(), func(c *cache.Config) { c.Timeout = 100 * time.Millisecond })
			d := &badDay{guardedWorld: guard(w, front, inbox.ModeDouble), server: server, over: make(chan struct{})}
			boxes := []*inbox.Box{d.box, w.box(inbox.Config{Policies: w.policies(nil), Cache: front})}
			w.within(patience, "an entry is kept", func() bool { return d.process(d.box, "before") == "replayed by cache" })
			day.come(d)
			var copies sync.WaitGroup
			for n := range 4 * badDayMessages {
				copies.Go(func() { d.copy(boxes[n%2], badMessage(n%badDayMessages)) })
			}
			copies.Wait()
			for n := range badDayMessages {
				d.copy(boxes[n%2], badMessage(n))
				d.wantEffects(id(badMessage(n)), 1)
			}
			d.copy(d.box, "before")
			d.wantEffects(id("before"), 1)
			close(d.over)
			d.running.Wait()
		})
	}
}

func (d *badDay) must(err error) {
	if err != nil {
		d.t.Error(err)
	}
}

// copy delivers a message until it is done.
func (d *badDay) copy(box *inbox.Box, message string) {
	for range 1000 {
		switch got := d.process(box, message); got {
		case "executed by table", "replayed by table", "replayed by cache":
			return
		case "in_progress by table":
			time.Sleep(10 * time.Millisecond)
		default:
			d.t.Errorf("%s: %s", message, got)
			return
		}
	}
	d.t.Errorf("%s is never done", message)
}

// tokenChild takes the token of a message in mode cache and never ends.
func tokenChild() {
	ctx := context.Background()
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	pool, err := pgxpool.New(ctx, os.Getenv("COMMITBOX_INBOX_URL"))
	fail(err)
	o, err := redis.ParseURL(os.Getenv("COMMITBOX_INBOX_REDIS"))
	fail(err)
	front, err := cache.New(redis.NewClient(o), frontConfig(os.Getenv("COMMITBOX_INBOX_PREFIX")))
	fail(err)
	policies, err := inbox.NewPolicies(pool, inbox.PoliciesConfig{Logger: quiet})
	fail(err)
	fail(policies.Load(ctx))
	box := childBox(inbox.Config{Policies: policies, Cache: front, Guard: front})
	_, err = inbox.Process(ctx, box, inbox.Message{ID: id("m")}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		fail(write(ctx, tx, id("m"), "hung"))
		fail(front.Put(ctx, inbox.Identity{}, id("begun"), inbox.CacheEntry{}, time.Minute)) // says that it holds the token
		select {}
	})
	fail(err)
	os.Exit(1)
}

// A process that holds a token is killed: within the lease the message is in progress, after it exactly one copy runs.
func TestB39_KilledWithATokenOfModeCache(t *testing.T) {
	g := newGuarded(t, inbox.ModeCache)
	g.exec(`select commitbox.inbox_policy_set('c', '{"lease": "3 seconds"}')`)
	g.load(g.policies)
	cmd := child(t, "token", g.URL, "COMMITBOX_INBOX_REDIS="+testenv.Redis(t), "COMMITBOX_INBOX_PREFIX="+g.front.prefix)
	g.within(patience, "the child runs the handler", func() bool { return g.front.keys(t) == 2 })
	g.want("while it runs", g.process(g.box, "m"), "in_progress by cache")
	time.Sleep(3500 * time.Millisecond)
	g.want("after a lease, which it renews", g.process(g.box, "m"), "in_progress by cache")
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	g.want("just after the kill", g.process(g.box, "m"), "in_progress by cache")
	g.load(g.policies)
	var copies sync.WaitGroup
	for _, box := range []*inbox.Box{g.box2(inbox.Config{Wait: patience}), g.box2(inbox.Config{Wait: patience})} {
		copies.Go(func() {
			if got := g.process(box, "m"); got != "executed by cache" && got != "replayed by cache" {
				t.Errorf("when the lease is over: %s", got)
			}
		})
	}
	copies.Wait()
	g.wantEffects(id("m"), 1)
}
