package inbox

import (
	"context"
	"math/rand/v2"
	"time"
)

const (
	pollFirst = 10 * time.Millisecond
	pollMax   = 250 * time.Millisecond
)

// poll spaces repeated questions: with growing, jittered pauses until a bound has passed.
type poll struct {
	until time.Time
	pause time.Duration
}

func newPoll(bound time.Duration) poll {
	return poll{until: time.Now().Add(bound), pause: pollFirst}
}

// next pauses and says whether to ask again: not once the bound has passed or the context has ended.
func (p *poll) next(ctx context.Context) bool {
	left := time.Until(p.until)
	if left <= 0 {
		return false
	}
	pause := min(left, jitter(p.pause))
	p.pause = min(2*p.pause, pollMax)
	return sleep(ctx, pause)
}

// jitter returns d ± 50 %.
func jitter(d time.Duration) time.Duration {
	return d/2 + rand.N(d+1)
}

// sleep says whether the context lived through the pause.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}
