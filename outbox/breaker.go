package outbox

import (
	"sync"
	"time"

	"github.com/commitbox/commitbox"
)

// breaker keeps a relay's lanes from a destination that is away. It opens when a call says so, and lets one lane try
// again after a while, longer after every failure; when that try succeeds all go on.
type breaker struct {
	cfg     RelayConfig
	backoff backoff

	mu       sync.Mutex
	failures int // 0: closed
	until    time.Time
	trying   bool
}

func newBreaker(cfg RelayConfig) *breaker {
	return &breaker{cfg: cfg, backoff: backoff{cfg.BackoffBase / 4, min(cfg.BackoffMax, 10*time.Second), cfg.random}}
}

// admit says whether a lane may publish now; if not, how long to wait. trial: it is the one that tries for all, and has to
// tell the outcome.
func (b *breaker) admit(now time.Time) (ok, trial bool, wait time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.failures == 0:
		return true, false, 0
	case b.trying:
		return false, false, b.cfg.PollMax
	case now.Before(b.until):
		return false, false, b.until.Sub(now)
	}
	b.trying = true
	return true, true, 0
}

// tell takes in what a round has met. A round that sent nothing changes nothing, but ends a trial.
func (b *breaker) tell(now time.Time, trial, confirmed bool, away error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if trial {
		b.trying = false
	}
	switch {
	case confirmed:
		if b.failures > 0 {
			b.cfg.Logger.Info("outbox: destination is back", "channel", b.cfg.Channel)
			b.cfg.Observer.Observe(commitbox.OutboxBreakerOpen, 0, b.cfg.Channel)
		}
		b.failures = 0
	case away != nil && (trial || b.failures == 0):
		b.failures++
		delay := b.backoff.next(b.failures)
		b.until = now.Add(delay)
		b.cfg.Logger.Warn("outbox: destination is away", "channel", b.cfg.Channel, "error", away, "retry_in", delay)
		b.cfg.Observer.Observe(commitbox.OutboxBreakerOpen, 1, b.cfg.Channel)
	}
}
