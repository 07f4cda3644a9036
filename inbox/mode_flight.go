package inbox

import (
	"context"
	"sync"
	"time"
)

// flights let one of many copies of a message in this process ask the stores for all of them.
type flights struct {
	mu   sync.Mutex
	open map[flightKey]*flight
}

type flightKey struct {
	ID
	fingerprint string
}

// flight is one copy on its way. Nothing is remembered of it once it has ended.
type flight struct {
	decided chan struct{} // closed when its handler begins, or when it ends without; nil while no other copy waits
	ended   chan struct{} // like decided
	begun   bool          // its handler began
	answer  verdict       // if not
	stopped bool          // its caller went away, so its answer says nothing about the message
}

func newFlights() *flights { return &flights{open: map[flightKey]*flight{}} }

func flightOf(m *Message) flightKey { return flightKey{m.ID, string(m.Fingerprint)} }

// do calls lead unless another copy is on its way, whose answer it then shares: in progress once that one's handler has
// begun, or what the stores said. While there is time left to wait, it waits for the end of that one and competes again,
// and so it does when that one's caller went away. lead calls begun when the handler begins.
func (f *flights) do(ctx context.Context, key flightKey, until time.Time, lead func(begun func()) verdict) verdict {
	for {
		mine, other := f.join(key)
		if mine != nil {
			return f.lead(ctx, key, mine, lead)
		}
		if !arrives(ctx, other.decided, -1) {
			return unavailable(ctx.Err())
		}
		switch {
		case other.begun:
			if !arrives(ctx, other.ended, max(0, time.Until(until))) {
				return verdict{outcome: InProgress}
			}
		case !other.stopped:
			return other.answer
		}
	}
}

// join opens a flight, or returns the one that is open.
func (f *flights) join(key flightKey) (mine, other *flight) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if other := f.open[key]; other != nil {
		other.await()
		return nil, other
	}
	mine = &flight{stopped: true}
	f.open[key] = mine
	return mine, nil
}

// await makes the channels for those who wait. The lock of the flights is held, as in begin and end.
func (f *flight) await() {
	if f.decided != nil {
		return
	}
	f.decided, f.ended = make(chan struct{}), make(chan struct{})
	if f.begun {
		close(f.decided)
	}
}

// begin is noted before those who wait are woken, and once: they read it without the lock.
func (f *flight) begin() {
	if f.begun { // it begins again after a serialization failure
		return
	}
	f.begun = true
	if f.decided != nil {
		close(f.decided)
	}
}

func (f *flight) end() {
	if f.decided == nil {
		return
	}
	if !f.begun {
		close(f.decided)
	}
	close(f.ended)
}

func (f *flights) lead(ctx context.Context, key flightKey, mine *flight, lead func(begun func()) verdict) verdict {
	defer func() { // even if the handler ends its goroutine
		f.mu.Lock()
		defer f.mu.Unlock()
		delete(f.open, key)
		mine.end()
	}()
	v := lead(func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		mine.begin()
	})
	if !mine.begun {
		mine.answer, mine.stopped = v, ctx.Err() != nil
		mine.answer.copy = nil
	}
	return v
}

// arrives waits for a channel to be closed, within the bound unless that is negative.
func arrives(ctx context.Context, closed <-chan struct{}, bound time.Duration) bool {
	var late <-chan time.Time
	if bound >= 0 {
		timer := time.NewTimer(bound)
		defer timer.Stop()
		late = timer.C
	}
	select {
	case <-closed:
		return true
	case <-late:
	case <-ctx.Done():
	}
	return false
}
