package scheduler

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/commitbox/commitbox/internal/db"
)

const (
	clockOffsetMax = time.Hour       // between the database's clock and this process's
	clockLeapMax   = 5 * time.Minute // of the database's clock past the monotonic one, from run to run
)

// ClockError says that a clean-up was refused because a clock cannot be trusted: a database that believes that it is next year
// would have everything removed. Nothing was changed. Look at both clocks; the refusal ends when they agree again, or when
// [Cleanup.ConfirmClock] says that the database is right.
type ClockError struct {
	Database time.Time     // what the database's clock said
	Offset   time.Duration // how far it is ahead of this process's clock; negative: behind
	Leap     time.Duration // how far it went past the monotonic clock since the last run; in the first one, how far this process's clock did
}

func (e *ClockError) Error() string {
	if e.Leap > clockLeapMax {
		return fmt.Sprintf("cleanup: refused: the clock leapt by %v since the last run, to %s: check it, then confirm the database's with ConfirmClock",
			e.Leap.Round(time.Second), e.Database.Format(time.RFC3339))
	}
	return fmt.Sprintf("cleanup: refused: the database's clock (%s) is %v off this process's: set the wrong one right, or confirm the database's with ConfirmClock",
		e.Database.Format(time.RFC3339), e.Offset.Round(time.Second))
}

// reading is both clocks at one moment. process has Go's monotonic reading too.
type reading struct{ database, process time.Time }

// offset is how far the database's clock is ahead, by the wall clock.
func (r reading) offset() time.Duration { return r.database.Sub(r.process.Round(0)) }

// clockGuard decides whether the database's clock may be believed. Its zero value has seen nothing.
type clockGuard struct {
	born reading // when the process began: what its wall clock said, in place of the database's; zero: not known

	mu        sync.Mutex
	last      *reading      // the last one that was believed
	confirmed time.Duration // the offset that a person has confirmed
}

// admit believes a reading, or says why not. A refused one is not remembered, so the next is compared with the same as before.
func (g *clockGuard) admit(now reading) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	refusal := &ClockError{Database: now.database, Offset: now.offset()}
	switch {
	case g.last != nil:
		refusal.Leap = now.database.Sub(g.last.database) - now.process.Sub(g.last.process)
	case !g.born.process.IsZero(): // nothing to compare with; but what moved both wall clocks has moved this process's too
		refusal.Leap = now.process.Round(0).Sub(g.born.database) - now.process.Sub(g.born.process)
	}
	off := min(refusal.Offset.Abs(), (refusal.Offset - g.confirmed).Abs())
	if off > clockOffsetMax || refusal.Leap > clockLeapMax {
		return refusal
	}
	g.last = &now
	return nil
}

func (g *clockGuard) confirm(now reading) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.last, g.confirmed = &now, now.offset()
}

// ConfirmClock says that the database's clock is right as it is now, after a person has looked: runs go on. It holds for this
// Cleanup until the process ends; every replica has its own, so have all of them call it, on a signal or a request of an operator.
func (c *Cleanup) ConfirmClock(ctx context.Context) error {
	now, err := c.readClocks(ctx, db.New(c.schema.On(c.pool)))
	if err != nil {
		return err
	}
	c.clock.confirm(now)
	c.cfg.Logger.Warn("cleanup: the database's clock was confirmed", "database", now.database, "offset", now.offset())
	return nil
}

// readClocks reads the process's clock when the database's answer has come: what the answer took makes the database look late,
// never early.
func (c *Cleanup) readClocks(ctx context.Context, q *db.Queries) (reading, error) {
	at, err := q.CleanupClock(ctx)
	return reading{at, c.now()}, err
}
