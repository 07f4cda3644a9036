package outbox

import (
	"sync"
	"time"
)

// lease tells until when the relay may send. It is renewed by the heartbeat and read by the lanes.
//
// Two clocks are asked and the one that says that more time has passed is believed: the monotonic clock stands still
// while the machine is suspended, the wall clock can be set back.
type lease struct {
	length time.Duration // what may be counted on, less the guard

	mu    sync.Mutex
	since time.Time // before the renewal that made it was sent, by the monotonic clock
	wall  time.Time // the same by the wall clock
}

func newLease(cfg RelayConfig, since time.Time) *lease {
	return &lease{length: safely(cfg.Lease) - cfg.Guard, since: since, wall: since.Round(0)}
}

func (l *lease) renewed(sent time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.since, l.wall = sent, sent.Round(0)
}

// left is how long sending is still safe; it may be negative.
func (l *lease) left(now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	elapsed := max(now.Sub(l.since), now.Round(0).Sub(l.wall))
	return l.length - elapsed
}
