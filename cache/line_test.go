package cache_test

import (
	"context"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// patient keeps the breaker out of a test.
func patient(c *cache.Config) { c.FailuresMax = 1_000_000 }

// together calls do in n goroutines at once.
func together(n int, do func(i int)) {
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() { do(i) })
	}
	all.Wait()
}

// TestManyAtATimeGetTheirOwnAnswers sends what goes together in pipelines: hits, misses, keys of another type, writes.
func TestManyAtATimeGetTheirOwnAnswers(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	c := open(t, client, prefix("line"))
	together(300, func(i int) {
		id := newID()
		switch i % 3 {
		case 0:
			if _, found, err := c.Get(context.Background(), here, id); err != nil || found {
				t.Errorf("an unknown id: %t %v", found, err)
			}
		case 1:
			if err := client.LPush(context.Background(), entryKey("line", id), "x").Err(); err != nil {
				t.Error(err)
			}
			defer client.Del(context.Background(), entryKey("line", id))
			if _, found, err := c.Get(context.Background(), here, id); err != nil || found {
				t.Errorf("a list: %t %v", found, err)
			}
		default:
			if err := c.Put(context.Background(), here, id, completed(id.Message), time.Minute); err != nil {
				t.Error(err)
			}
			entry, found, err := c.Get(context.Background(), here, id)
			if err != nil || !found || string(entry.Result[1:]) != id.Message {
				t.Errorf("%+v %t %v", entry, found, err)
			}
		}
	})
}

// TestB5_RefusedWritesHoldUpNoReads has a client that repeats what a server that takes no writes has refused, later.
func TestB5_RefusedWritesHoldUpNoReads(t *testing.T) {
	t.Parallel()
	s := private(t)
	client := connect(t, s.URL(), func(o *redis.Options) {
		o.MaxRetries, o.MinRetryBackoff, o.MaxRetryBackoff = 3, 2*time.Second, 2*time.Second
	})
	c := open(t, client, patient)
	must(t, client.Do(t.Context(), "REPLICAOF", "127.0.0.1", "1").Err())
	together(32, func(i int) {
		if i%2 == 0 {
			_ = c.Put(context.Background(), here, newID(), completed("x"), time.Minute) // refused
			return
		}
		for range 50 {
			if _, _, err := c.Get(context.Background(), here, newID()); err != nil {
				t.Errorf("a read beside refused writes: %v", err)
				return
			}
		}
	})
}

// TestB5_ANodeThatHangsHoldsUpNoOther asks all nodes of a cluster at once while one of them does not answer.
func TestB5_ANodeThatHangsHoldsUpNoOther(t *testing.T) {
	t.Parallel()
	nodes, addresses := cluster(t)
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addresses, ContextTimeoutEnabled: true, MaxRedirects: -1})
	t.Cleanup(func() { must(t, client.Close()) })
	c := open(t, client, patient, budget(time.Second))
	wantMiss(t, c, here, newID())
	must(t, nodes[0].Do(t.Context(), "CLIENT", "PAUSE", 3000, "ALL").Err())
	slots := make([]int64, 60)
	ids := make([]inbox.ID, len(slots))
	for i := range ids {
		ids[i] = newID()
		var err error
		slots[i], err = nodes[1].ClusterKeySlot(t.Context(), ids[i].Key()).Result()
		must(t, err)
	}
	together(len(ids), func(i int) {
		if _, _, err := c.Get(context.Background(), here, ids[i]); (err == nil) != (slots[i] >= 5462) {
			t.Errorf("slot %d: %v", slots[i], err)
		}
	})
}

// TestWhatNobodyWaitsForIsNotSent has a Redis that hangs under a client that waits for it much longer than the budget.
func TestWhatNobodyWaitsForIsNotSent(t *testing.T) {
	t.Parallel()
	s := private(t)
	direct := connect(t, s.URL())
	client := connect(t, s.URL(), func(o *redis.Options) { o.ContextTimeoutEnabled, o.ReadTimeout = false, 2*time.Second })
	c := open(t, client, patient, budget(300*time.Millisecond))
	wantMiss(t, c, here, newID())
	before := calls(t, direct, "getrange")
	must(t, s.Pause())
	for range 2 { // pipelines that are stuck
		go func() { _, _, _ = c.Get(context.Background(), here, newID()) }()
		time.Sleep(20 * time.Millisecond)
	}
	together(500, func(int) {
		_, _, err := c.Get(context.Background(), here, newID())
		wantUnavailable(t, err)
	})
	time.Sleep(50 * time.Millisecond)
	must(t, s.Resume())
	eventually(t, func() error { _, _, err := c.Get(context.Background(), here, newID()); return err })
	if n := calls(t, direct, "getrange") - before; n > 50 {
		t.Errorf("%d calls were made, nobody waited for most of them", n)
	}
}

// pipelines is a hook that keeps how many commands went together, and lets Redis answer late, so that callers meet.
type pipelines struct {
	mu    sync.Mutex
	sizes []int
}

func (p *pipelines) DialHook(next redis.DialHook) redis.DialHook { return next }

func (p *pipelines) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		time.Sleep(20 * time.Millisecond)
		return next(ctx, cmd)
	}
}

func (p *pipelines) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		p.mu.Lock()
		p.sizes = append(p.sizes, len(cmds))
		p.mu.Unlock()
		time.Sleep(20 * time.Millisecond)
		return next(ctx, cmds)
	}
}

// largest returns the number of commands of the largest pipeline since the last call.
func (p *pipelines) largest() (n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, size := range p.sizes {
		n = max(n, size)
	}
	p.sizes = nil
	return n
}

// TestAPipelineIsBoundedInBytes sends and reads entries of 100 000 bytes, of which two fit into a pipeline, between small ones,
// which go by the dozen.
func TestAPipelineIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	client := connect(t, private(t).URL())
	c := open(t, client, patient, budget(20*time.Second))
	sent := new(pipelines)
	client.AddHook(sent)
	for name, kind := range map[string]struct{ bytes, least, most int }{"small": {10, 8, 128}, "large": {100_000, 2, 2}} {
		ids := make([]inbox.ID, 64)
		for i := range ids {
			ids[i] = newID()
		}
		entry := completed(strings.Repeat("x", kind.bytes))
		together(len(ids), func(i int) {
			if err := c.Put(context.Background(), here, ids[i], entry, time.Minute); err != nil {
				t.Error(err)
			}
		})
		if n := sent.largest(); n < kind.least || n > kind.most {
			t.Errorf("%s: %d writes in one pipeline", name, n)
		}
		wantHit(t, c, ids[0], entry) // tells how long answers are
		sent.largest()
		together(len(ids), func(i int) {
			if _, found, err := c.Get(context.Background(), here, ids[i]); err != nil || !found {
				t.Errorf("found %v, %v", found, err)
			}
		})
		if n := sent.largest(); n < kind.least || n > kind.most {
			t.Errorf("%s: %d reads in one pipeline", name, n)
		}
	}
}
