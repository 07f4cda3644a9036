package outbox

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/commitbox/commitbox"
)

const (
	checkpointEvery = 20 * time.Millisecond // how often at most the open writers are asked for
	leakCheckEvery  = time.Second           // how often they are asked for because of a leaked one alone
	busyFor         = time.Second           // how long after the last movement the gate looks at its fastest
)

// gate is shared by the lanes of a relay. It tells them when there may be something to read, and up to where a read is
// final. It costs one look at a sequence while nothing happens.
type gate struct {
	cfg     RelayConfig
	store   store
	horizon horizon

	// used by the goroutine that calls look
	link         link
	serverStart  time.Time
	startChecked time.Time
	checkpointed time.Time
	position     int64
	moved        time.Time
	interval     time.Duration

	mu      sync.Mutex
	current view
	changed chan struct{} // closed when current changes
}

// view is what the gate tells.
type view struct {
	pulse      uint64 // moves whenever a read may find something
	generation uint64 // floors that were set under another generation are void
	resolved   int64  // nothing can appear at or below it in a read that starts now
}

func newGate(cfg RelayConfig, s store) *gate {
	return &gate{
		cfg: cfg, store: s, horizon: horizon{maxAge: cfg.MaxWriterAge}, interval: cfg.PollMin,
		changed: make(chan struct{}),
	}
}

func (g *gate) view() (view, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.current, g.changed
}

func (g *gate) publish(reset bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.current.pulse++
	g.current.resolved = g.horizon.resolved
	if reset {
		g.current.generation++
	}
	close(g.changed)
	g.changed = make(chan struct{})
}

// run looks until ctx ends.
func (g *gate) run(ctx context.Context, report func(error)) {
	defer g.close()
	failures := 0
	for {
		wait := g.interval
		if err := g.look(ctx, time.Now()); err == nil {
			failures = 0
		} else if ctx.Err() == nil {
			failures++
			wait = reconnect.next(failures)
			report(err)
		}
		if !sleep(ctx, wait) {
			return
		}
	}
}

// look asks the database once. After an error all floors are void: whoever answers next may be another server.
func (g *gate) look(ctx context.Context, now time.Time) error {
	reset, err := g.ask(ctx, now)
	if err != nil {
		g.close()
		g.lost()
		return err
	}
	unsettled := g.position > g.horizon.resolved
	view, _ := g.view()
	if reset || unsettled || g.moved.Equal(now) || view.resolved != g.horizon.resolved {
		g.publish(reset)
	}
	if now.Sub(g.moved) < busyFor {
		g.interval = g.cfg.PollMin
	} else {
		g.interval = min(2*g.interval, g.cfg.PollMax)
	}
	return nil
}

// ask brings position and horizon up to date, and says whether floors are void.
func (g *gate) ask(ctx context.Context, now time.Time) (reset bool, err error) {
	if g.link == nil {
		if g.link, err = g.store.connect(ctx); err != nil {
			return false, err
		}
	}
	if now.Sub(g.startChecked) >= time.Second {
		start, err := g.link.serverStart(ctx)
		if err != nil {
			return false, err
		}
		reset = !g.serverStart.IsZero() && !start.Equal(g.serverStart)
		g.serverStart, g.startChecked = start, now
	}
	position, err := g.link.position(ctx)
	if err != nil {
		return false, err
	}
	if reset = reset || position < g.position; reset {
		g.horizon = horizon{maxAge: g.cfg.MaxWriterAge}
	}
	if position != g.position {
		g.position, g.moved = position, now
	}
	return g.checkpoint(ctx, now, reset)
}

// checkpoint asks for the open writers, where their end would tell something and they were not asked for just now.
func (g *gate) checkpoint(ctx context.Context, now time.Time, reset bool) (bool, error) {
	since := now.Sub(g.checkpointed)
	settled := g.position == g.horizon.resolved
	if settled && (g.horizon.leaks() == 0 || since < leakCheckEvery) || since < checkpointEvery {
		return reset, nil
	}
	writers, err := g.link.writers(ctx)
	if err != nil {
		return false, err
	}
	g.checkpointed = now
	leaked, ended := g.horizon.observe(now, g.position, writers)
	for _, w := range leaked {
		g.cfg.Logger.Warn("outbox: a transaction that has enqueued stays open and is not waited for any more; later messages of its keys may overtake its own",
			slog.Int("pid", int(w.pid)), slog.Duration("seen_for", now.Sub(w.seen)))
	}
	if len(leaked) > 0 || ended {
		g.cfg.Observer.Observe(commitbox.OutboxLeakedWriters, float64(g.horizon.leaks()), g.cfg.Channel)
	}
	return reset || ended, nil
}

// lost voids everything that was learned from a server that does not answer any more.
func (g *gate) lost() {
	g.horizon = horizon{maxAge: g.cfg.MaxWriterAge}
	g.serverStart, g.startChecked, g.checkpointed, g.position = time.Time{}, time.Time{}, time.Time{}, 0
	g.publish(true)
}

func (g *gate) close() {
	if g.link != nil {
		g.link.close()
		g.link = nil
	}
}

// reconnect paces attempts to reach the database.
var reconnect = backoff{base: 20 * time.Millisecond, max: 2 * time.Second}

// sleep waits; false: ctx ended first.
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
