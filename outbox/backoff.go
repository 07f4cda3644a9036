package outbox

import (
	"math/rand/v2"
	"time"
)

// backoff is a capped exponential backoff with full jitter.
type backoff struct {
	base, max time.Duration
	random    func() float64 // in [0, 1); nil: rand.Float64
}

// delay returns how long to wait after the given number of failures, from 1: between base/2 and the smaller of max and
// base·2^(failures-1). random is in [0, 1).
func (b backoff) delay(failures int, random float64) time.Duration {
	ceiling := b.base
	for range min(failures-1, 63) {
		if ceiling >= b.max/2 {
			ceiling = b.max
			break
		}
		ceiling *= 2
	}
	floor := b.base / 2
	return floor + time.Duration(random*float64(min(ceiling, b.max)-floor))
}

func (b backoff) next(failures int) time.Duration {
	if b.random == nil {
		return b.delay(failures, rand.Float64())
	}
	return b.delay(failures, b.random())
}
