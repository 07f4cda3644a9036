package inbox

import (
	"context"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// crowd is many copies of a few messages, each of which may end in any way.
type crowd struct {
	t      *testing.T
	f      *flights
	leads  [3]atomic.Int64 // the copies of a message that ask at this moment
	answer atomic.Int64
	shared sync.Map // the answers that others may get: those of a copy that ended without a handler
}

// crowdPanic is what a copy panics with.
type crowdPanic struct{}

// copyOf is one copy: it ends with its own answer, with that of another one that may be shared, or with none.
func (c *crowd) copyOf(message int) {
	ctx, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	if rand.N(4) == 0 {
		time.AfterFunc(rand.N(time.Millisecond), cancel)
	}
	defer func() {
		if v := recover(); v != nil && v != any(crowdPanic{}) {
			panic(v)
		}
	}()
	mine := c.answer.Add(1)
	v := c.f.do(ctx, key(string(rune('a'+message))), time.Now().Add(rand.N(2*time.Millisecond)), func(begun func()) verdict {
		if c.leads[message].Add(1) != 1 {
			c.t.Error("two copies ask at a time")
		}
		defer c.leads[message].Add(-1)
		return c.lead(begun, mine)
	})
	if _, ok := c.shared.Load(int64(v.attempt)); v.attempt != 0 && int64(v.attempt) != mine && !ok {
		c.t.Errorf("copy %d got what %d kept for itself", mine, v.attempt)
	}
	if v.attempt == 0 && v.outcome != InProgress && (v.outcome != Unavailable || ctx.Err() == nil) {
		c.t.Errorf("copy %d got no answer: %s", mine, v.outcome)
	}
}

func (c *crowd) lead(begun func(), mine int64) verdict {
	pause := func() {
		for range rand.N(3) {
			runtime.Gosched()
		}
		if rand.N(4) == 0 {
			time.Sleep(rand.N(500 * time.Microsecond))
		}
	}
	pause()
	begins := rand.N(4)
	for range begins { // again, as after a serialization failure
		begun()
		pause()
	}
	switch rand.N(8) {
	case 0:
		panic(crowdPanic{})
	case 1:
		runtime.Goexit()
	}
	if begins == 0 {
		c.shared.Store(mine, true)
		return verdict{outcome: Replayed, attempt: int(mine)}
	}
	return verdict{outcome: Executed, attempt: int(mine)}
}

// Whatever becomes of the copy that asks, those that wait go on: with its answer if no handler began and its caller is there,
// and else one of them at a time asks.
func TestA10_EveryCopyGoesOnWhateverBecomesOfTheOneThatAsks(t *testing.T) {
	t.Parallel()
	c := crowd{t: t, f: newFlights()}
	var group sync.WaitGroup
	for i := range 200 {
		group.Go(func() {
			for range 100 {
				var one sync.WaitGroup // a copy may end its goroutine
				one.Go(func() { c.copyOf(i % len(c.leads)) })
				one.Wait()
			}
		})
	}
	group.Wait()
	if len(c.f.open) != 0 {
		t.Errorf("%d are open", len(c.f.open))
	}
}
