package outbox

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/commitbox/commitbox"
)

// tickEvery is how often a relay looks at who else is there and what it owns.
const tickEvery = time.Second

// daysEvery is how often a relay makes and drops days of kept messages. They are made seven ahead.
const daysEvery = time.Hour

// roster keeps the relay's fair share of the channel's shards: it takes free ones, and gives surplus ones back once the
// lanes have finished with them. Lanes work under an assignment and take up a new one between two rounds, with nothing
// in flight; so a shard is never read by a lane and by its next owner at once.
type roster struct {
	cfg   RelayConfig
	store store
	owner uuid.UUID
	poked chan struct{}

	link     link
	draining []holding // not assigned any more, given back when every lane has adopted drainedAt
	drained  uint64
	daysMade time.Time

	mu      sync.Mutex
	current assignment
	adopted []uint64      // by lane: the assignment it works under
	changed chan struct{} // closed when current changes
}

// assignment is what the lanes may serve. It is not changed once it is published.
type assignment struct {
	version uint64
	held    []holding
	unclean map[int16]probe // shards taken over from a relay that died, with what it noted last
	hold    bool            // a dead message holds its key
	keep    bool            // confirmed messages are kept
}

func newRoster(cfg RelayConfig, s store, owner uuid.UUID) *roster {
	return &roster{
		cfg: cfg, store: s, owner: owner, poked: make(chan struct{}, 1),
		adopted: make([]uint64, cfg.Lanes), changed: make(chan struct{}),
	}
}

// assigned returns the assignment, and a channel that is closed when there is a newer one.
func (r *roster) assigned() (assignment, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current, r.changed
}

// adopt tells that a lane works under an assignment, and under no older one any more.
func (r *roster) adopt(lane int, version uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.adopted[lane] = version
	if len(r.draining) > 0 && slices.Min(r.adopted) >= r.drained {
		r.poke()
	}
}

// poke makes the roster look at once.
func (r *roster) poke() {
	select {
	case r.poked <- struct{}{}:
	default:
	}
}

// run looks until ctx ends.
func (r *roster) run(ctx context.Context, report func(error)) {
	defer r.close()
	for failures := 0; ctx.Err() == nil; {
		wait := tickEvery
		if err := r.look(ctx); err == nil {
			failures = 0
		} else if ctx.Err() == nil {
			failures++
			wait = reconnect.next(failures)
			report(err)
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
		case <-timer.C:
		case <-r.poked:
		}
		timer.Stop()
	}
}

// look compares what the relay owns with its share, and acts on the difference.
func (r *roster) look(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if r.link == nil {
		if r.link, err = r.store.connect(ctx); err != nil {
			return err
		}
	}
	if err := r.release(ctx); err != nil {
		return err
	}
	around, err := r.link.look(ctx, r.owner)
	if err != nil {
		return err
	}
	if around.expired || around.free > 0 && len(around.held) < fairShare(around.members, around.rank) {
		if err := r.store.claim(ctx, r.owner); err != nil {
			return err
		}
		if around, err = r.link.look(ctx, r.owner); err != nil {
			return err
		}
	}
	if around.keep && time.Since(r.daysMade) > daysEvery {
		if err := r.store.sentDays(ctx); err != nil {
			return fmt.Errorf("make the days of kept messages: %w", err)
		}
		r.daysMade = time.Now()
	}
	r.assign(around)
	return nil
}

// release gives back what the lanes have finished with.
func (r *roster) release(ctx context.Context) error {
	r.mu.Lock()
	ready := len(r.draining) > 0 && slices.Min(r.adopted) >= r.drained
	r.mu.Unlock()
	if !ready {
		return nil
	}
	if err := r.store.release(ctx, r.owner, r.draining); err != nil {
		return err
	}
	r.setDraining(nil, 0)
	return nil
}

// assign publishes what the lanes may serve: all that is held, less what goes to others.
func (r *roster) assign(around surroundings) {
	next := assignment{held: around.held, unclean: around.unclean, hold: around.hold, keep: around.keep}
	if len(r.draining) > 0 {
		next.held = without(next.held, r.draining)
	}
	var surplus []holding
	if share := fairShare(around.members, around.rank); len(r.draining) == 0 && len(next.held) > share {
		next.held, surplus = next.held[:share], next.held[share:]
	}
	version := r.publish(next)
	if len(surplus) > 0 {
		r.setDraining(surplus, version)
	}
}

// publish makes an assignment the current one, unless nothing changes by it, and returns the current version.
func (r *roster) publish(next assignment) uint64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.current.version > 0 && slices.Equal(next.held, r.current.held) && next.hold == r.current.hold && next.keep == r.current.keep {
		return r.current.version
	}
	next.version = r.current.version + 1
	r.current = next
	close(r.changed)
	r.changed = make(chan struct{})
	r.cfg.Observer.Observe(commitbox.OutboxOwnedShards, float64(len(next.held)), r.cfg.Channel)
	return next.version
}

func (r *roster) setDraining(shards []holding, version uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.draining, r.drained = shards, version
}

func without(held, gone []holding) []holding {
	var rest []holding
	for _, h := range held {
		if !slices.Contains(gone, h) {
			rest = append(rest, h)
		}
	}
	return rest
}

func (r *roster) close() {
	if r.link != nil {
		r.link.close()
		r.link = nil
	}
}

// fairShare is how many shards the relay of a rank, from 0, should own among so many. The shares add up to all shards, so
// nothing is left over and nothing wanders.
func fairShare(members, rank int) int {
	if members == 0 {
		return 0
	}
	share := shards / members
	if rank < shards%members {
		share++
	}
	return share
}
