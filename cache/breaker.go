package cache

import (
	"sync"
	"time"
)

// breaker keeps calls from a server that is away. It opens after a number of failures in a row, and lets one call through
// after each pause; when that one succeeds it closes.
type breaker struct {
	failuresMax int
	pause       time.Duration

	mu       sync.Mutex
	failures int
	open     bool
	until    time.Time
	probing  bool
}

// admit says whether a call may be made. probe: it is the one that tries for all, and has to tell the outcome.
func (b *breaker) admit(now time.Time) (ok, probe bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case !b.open:
		return true, false
	case b.probing || now.Before(b.until):
		return false, false
	}
	b.probing = true
	return true, true
}

// tell takes in how a call ended, and reports whether the breaker opened or closed by it. What was sent before it opened
// says nothing about the server as it is now.
func (b *breaker) tell(now time.Time, probe, away bool) (opened, closed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if probe {
		b.probing = false
	}
	switch {
	case b.open && !probe:
		return false, false
	case !away:
		closed = b.open
		b.open, b.failures = false, 0
		return false, closed
	}
	b.failures++
	if b.failures >= b.failuresMax {
		opened = !b.open
		b.open, b.until = true, now.Add(b.pause)
	}
	return opened, false
}
