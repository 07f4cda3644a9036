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

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
)

// badDay is a Redis of a test's own, to which something happens while messages are delivered.
type badDay struct {
	*guardedWorld
	server  *devserver.Server
	liar    *liar
	seen    *counts
	over    chan struct{}
	running sync.WaitGroup
}

func (d *badDay) redis(args ...any) {
	if err := d.front.client.Do(context.Background(), args...).Err(); err != nil {
		d.t.Error(err)
	}
}

// counted says whether something was counted.
func counted(metric *commitbox.Metric, labels ...string) func(*badDay) bool {
	return func(d *badDay) bool {
		d.seen.mu.Lock()
		defer d.seen.mu.Unlock()
		return d.seen.seen[metric.Name+fmt.Sprint(labels)] > 0
	}
}

// every says that all of these are so.
func every(signs ...func(*badDay) bool) func(*badDay) bool {
	return func(d *badDay) bool {
		for _, sign := range signs {
			if !sign(d) {
				return false
			}
		}
		return true
	}
}

// evicted says that Redis has dropped keys.
func evicted(d *badDay) bool {
	stats := d.front.client.Info(context.Background(), "stats").Val()
	return strings.Contains(stats, "evicted_keys:") && !strings.Contains(stats, "evicted_keys:0\r")
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

// flushed says that Redis was emptied more than once.
func flushed(d *badDay) bool {
	stats := d.front.client.Info(context.Background(), "commandstats").Val()
	return strings.Contains(stats, "cmdstat_flushall:calls=") && !strings.Contains(stats, "cmdstat_flushall:calls=1,")
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

// Whatever happens to Redis, in modes double and postgres each message has its effect once, by Process and by Handle, and
// every copy is handled or answered: none is refused. Each day shows by a sign that it came.
func TestB5_P12_OnBadDaysOfRedisEachMessageHasOneEffect(t *testing.T) {
	full := []string{"--maxmemory", "3mb", "--maxmemory-policy"}
	says := func(answer string, commands ...string) func(*badDay) {
		return func(d *badDay) { d.liar.says(answer, commands...) }
	}
	failed := func(operation, kind string) func(*badDay) bool {
		return counted(commitbox.CacheErrors, operation, kind)
	}
	found := func(what string) func(*badDay) bool { return counted(commitbox.CacheLookups, "c", what) }
	for name, day := range map[string]struct {
		args []string
		come func(*badDay)
		sign func(*badDay) bool
		hung bool // then the time budget is short
	}{
		"stopped":      {nil, func(d *badDay) { d.must(d.server.Pause()) }, failed("get", "timeout"), true},
		"killed":       {nil, func(d *badDay) { d.must(d.server.Kill()) }, failed("get", "connection"), false},
		"starts empty": {nil, func(d *badDay) { d.must(d.server.Kill()); d.must(d.server.Restart(context.Background())) }, every(), false},
		"clients paused": {nil, func(d *badDay) {
			d.all(500*time.Millisecond, func() { d.redis("CLIENT", "PAUSE", 300, "ALL") })
		}, failed("get", "timeout"), true},
		"full":        {append(full, "noeviction"), func(d *badDay) { d.fill() }, failed("put", "write_refused"), false},
		"evicts":      {append(full, "allkeys-lru"), func(d *badDay) { d.all(time.Millisecond, d.fill) }, evicted, false},
		"flushed":     {nil, func(d *badDay) { d.all(100*time.Millisecond, func() { d.redis("FLUSHALL") }) }, flushed, false},
		"read-only":   {nil, func(d *badDay) { d.redis("REPLICAOF", "127.0.0.1", "1") }, failed("put", "write_refused"), false},
		"forged":      {nil, func(d *badDay) { d.forge() }, every(found("forged"), found("unreadable"), found("oversized")), false},
		"READONLY":    {nil, says("READONLY You can't write against a read only replica.", "set", "evalsha", "eval"), failed("put", "write_refused"), false},
		"LOADING":     {nil, says("LOADING Redis is loading the dataset in memory"), failed("get", "not_ready"), false},
		"MOVED":       {nil, says("MOVED 3999 127.0.0.1:1"), failed("get", "not_ready"), false},
		"CLUSTERDOWN": {nil, says("CLUSTERDOWN The cluster is down"), failed("get", "not_ready"), false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			server := testenv.PrivateRedis(t, devserver.RedisOptions{Args: day.args})
			liar := newLiar(t, server.URL())
			seen := &counts{seen: map[string]float64{}}
			front := newFront(t, liar.url, func(c *cache.Config) {
				c.Observer = seen
				if day.hung {
					c.Timeout = 100 * time.Millisecond
				}
			})
			d := &badDay{guardedWorld: guard(w, front, inbox.ModeDouble), server: server, liar: liar, seen: seen, over: make(chan struct{})}
			boxes := []*inbox.Box{d.box, w.box(inbox.Config{Policies: w.policies(nil), Cache: front, Guard: front})}
			w.within(patience, "an entry is kept", func() bool { return d.process(d.box, "before") == "replayed by cache" })
			day.come(d)
			ids := []inbox.ID{id("before"), byRow("before").ID}
			for n := range badDayMessages {
				ids = append(ids, id(badMessage(n)), byRow(badMessage(n)).ID)
			}
			var copies sync.WaitGroup
			for _, of := range ids {
				for _, box := range boxes {
					copies.Go(func() { d.copy(box, of, d.byProcess) })
					copies.Go(func() { d.copy(box, of, d.byHandle) })
				}
			}
			copies.Wait()
			for n := 0; !day.sign(d) && n < 1000; n++ {
				ids = append(ids, id(fmt.Sprint("late ", n)))
				d.copy(d.box, ids[len(ids)-1], d.byProcess)
			}
			if !day.sign(d) {
				t.Errorf("the day did not come: %v", seen.seen)
			}
			for n, of := range ids {
				d.copy(boxes[n%2], of, d.byProcess)
				d.copy(boxes[n%2], of, d.byHandle)
				d.wantEffects(of, 1)
			}
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

func (d *badDay) byProcess(box *inbox.Box, of inbox.ID) string {
	return d.deliver(box, inbox.Message{ID: of})
}

// byHandle delivers a message in a transaction of the caller.
func (d *badDay) byHandle(box *inbox.Box, of inbox.ID) string {
	ctx := context.Background()
	tx, err := d.Pool.Begin(ctx)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = tx.Rollback(ctx) }()
	res, err := inbox.Handle(ctx, tx, of, func(ctx context.Context) (string, error) {
		return "value of " + of.Message, write(ctx, tx, of, "done")
	}, inbox.Using(box))
	if err == nil {
		err = tx.Commit(ctx)
	}
	if err == nil && res.Value != "value of "+of.Message {
		return fmt.Sprintf("%s with %q", res.Outcome, res.Value)
	}
	return res.Outcome.String() + " by " + res.DecidedBy.String()
}

// copy delivers a message until it is done.
func (d *badDay) copy(box *inbox.Box, of inbox.ID, deliver func(*inbox.Box, inbox.ID) string) {
	for range 1000 {
		switch got := deliver(box, of); {
		case got == "executed by table", got == "replayed by table", got == "replayed by cache" && of.Consumer == "c":
			return
		case got == "in_progress by table":
			time.Sleep(10 * time.Millisecond)
		default:
			d.t.Errorf("%s: %s", of, got)
			return
		}
	}
	d.t.Errorf("%s is never done", of)
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
