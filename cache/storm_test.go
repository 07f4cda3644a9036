package cache_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/commitbox/commitbox/internal/testenv"

	"github.com/redis/go-redis/v9"
)

// calls returns how often a server has executed a command.
func calls(t testing.TB, client *redis.Client, command string) (n int) {
	t.Helper()
	stats, err := client.Info(context.Background(), "commandstats").Result()
	must(t, err)
	for line := range strings.Lines(stats) {
		if rest, ok := strings.CutPrefix(line, "cmdstat_"+command+":calls="); ok {
			_, err := fmt.Sscan(strings.ReplaceAll(rest, ",", " "), &n)
			must(t, err)
		}
	}
	return n
}

// TestA10_AHotKeyCostsAHandfulOfCalls sends ten thousand duplicates of one message at once.
func TestA10_AHotKeyCostsAHandfulOfCalls(t *testing.T) {
	t.Parallel()
	s := private(t)
	proxy := testenv.NewProxy(t, s.URL())
	direct := connect(t, s.URL())
	c := open(t, connect(t, proxy.URL(t, s.URL())), budget(20*time.Second))
	id := newID()
	must(t, c.Put(t.Context(), here, id, completed("x"), time.Minute))
	proxy.Latency(100 * time.Millisecond) // so that the callers meet
	before := calls(t, direct, "getrange")
	var all sync.WaitGroup
	start := make(chan struct{})
	for range 10_000 {
		all.Go(func() {
			<-start
			if _, found, err := c.Get(context.Background(), here, id); err != nil || !found {
				t.Errorf("found %v, %v", found, err)
			}
		})
	}
	close(start)
	all.Wait()
	if n := calls(t, direct, "getrange") - before; n > 20 {
		t.Errorf("redis was asked %d times", n)
	}
}

// TestA10_LookUpsWriteNothing asks for ids that nobody has sent.
func TestA10_LookUpsWriteNothing(t *testing.T) {
	t.Parallel()
	s := private(t)
	client := connect(t, s.URL())
	c := open(t, client)
	for range 1000 {
		wantMiss(t, c, here, newID())
	}
	if n := client.DBSize(t.Context()).Val(); n != 0 {
		t.Errorf("redis has %d keys", n)
	}
}

// TestB47_ALeaderThatGoesTakesNobodyWithIt ends the context of the caller who came first while fifty wait with it.
func TestB47_ALeaderThatGoesTakesNobodyWithIt(t *testing.T) {
	t.Parallel()
	s := private(t)
	proxy := testenv.NewProxy(t, s.URL())
	direct := connect(t, s.URL())
	c := open(t, connect(t, proxy.URL(t, s.URL())), budget(20*time.Second))
	id := newID()
	must(t, c.Put(t.Context(), here, id, completed("x"), time.Minute))
	before := calls(t, direct, "getrange")
	proxy.BlackHole(testenv.ToClient)
	// A deadline, because go-redis heeds that while it waits for an answer.
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	var all sync.WaitGroup
	all.Go(func() {
		if _, _, err := c.Get(ctx, here, id); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("the leader got %v", err)
		}
	})
	eventually(t, func() error {
		if calls(t, direct, "getrange") == before {
			return errors.New("the leader has not asked")
		}
		return nil
	})
	var hits atomic.Int32
	var joined sync.WaitGroup
	for range 50 {
		joined.Add(1)
		all.Go(func() {
			joined.Done()
			if _, found, err := c.Get(context.Background(), here, id); err != nil || !found {
				t.Errorf("found %v, %v", found, err)
			}
			hits.Add(1)
		})
	}
	joined.Wait()
	<-ctx.Done()
	time.Sleep(50 * time.Millisecond)
	proxy.Heal()
	all.Wait()
	if n := calls(t, direct, "getrange") - before; n > 3 || hits.Load() != 50 {
		t.Errorf("redis was asked %d times, %d of 50 were answered", n, hits.Load())
	}
}

// TestB47_AFailedLookUpIsNotShared loses an answer: who comes later asks again.
func TestB47_AFailedLookUpIsNotShared(t *testing.T) {
	t.Parallel()
	s := private(t)
	proxy := testenv.NewProxy(t, s.URL())
	c := open(t, connect(t, proxy.URL(t, s.URL())), budget(200*time.Millisecond))
	id := newID()
	eventually(t, func() error { return c.Put(t.Context(), here, id, completed("x"), time.Minute) })
	proxy.BlackHole(testenv.ToClient)
	_, _, err := c.Get(t.Context(), here, id)
	wantUnavailable(t, err)
	proxy.Heal()
	eventually(t, func() error {
		if _, found, err := c.Get(t.Context(), here, id); err != nil || !found {
			return fmt.Errorf("found %v, %w", found, err)
		}
		return nil
	})
}
