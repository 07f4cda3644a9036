package outbox

import (
	"context"
	"time"
)

const (
	clockEvery = 500 * time.Millisecond // how often to look for messages that have become due, or were scheduled meanwhile
	clockRest  = 20 * time.Millisecond  // those that become due within it are moved together
	clockBatch = 1000
)

// clock gives scheduled messages their place when they are due. Every relay of a channel has one, and needs no ownership
// for it; one at a time does the work.
type clock struct {
	store store
	link  link
}

// run moves due messages until ctx ends.
func (c *clock) run(ctx context.Context, report func(error)) {
	defer c.close()
	for failures := 0; ctx.Err() == nil; {
		wait, err := c.move(ctx)
		if err == nil {
			failures = 0
		} else if ctx.Err() == nil {
			failures++
			wait = reconnect.next(failures)
			report(err)
		}
		sleep(ctx, wait)
	}
}

// move gives one batch its place and says how long to wait before the next.
func (c *clock) move(ctx context.Context) (time.Duration, error) {
	if c.link == nil {
		var err error
		if c.link, err = c.store.connect(ctx); err != nil {
			return 0, err
		}
	}
	moved, nextIn, err := c.link.moveScheduled(ctx, clockBatch)
	if err != nil {
		c.close()
		return 0, err
	}
	if moved == clockBatch {
		return 0, nil
	}
	return max(clockRest, min(nextIn, clockEvery)), nil
}

func (c *clock) close() {
	if c.link != nil {
		c.link.close()
		c.link = nil
	}
}
