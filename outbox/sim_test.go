package outbox

import (
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
)

var (
	simSeed  = flag.Uint64("sim.seed", 0, "replay one seed of the simulation")
	simCount = flag.Int("sim.seeds", 0, "how many seeds to simulate; default 150, 3000 in a soak")
)

// TestSimulation runs the relay's code against a store in memory under thousands of interleavings of kills, pauses past
// the lease, joins and leaves, lost answers, late commits, aborts, refusals, outages, scheduled and kept messages, and
// everything that an operator can do. A failing seed is
// replayed with: go test ./outbox -run TestSimulation -sim.seed=N
func TestSimulation(t *testing.T) {
	if *simSeed > 0 {
		simulateOne(t, *simSeed)
		return
	}
	n := *simCount
	if n == 0 {
		n = 150
		if os.Getenv("COMMITBOX_SOAK") != "" {
			n = 3000
		}
	}
	done := map[string]int{}
	for seed := range n {
		for what, times := range simulateOne(t, uint64(seed+1)) {
			done[what] += times
		}
		if t.Failed() {
			return
		}
	}
	t.Logf("%v", done)
	for _, what := range []string{"requeue", "discard", "park", "release", "retry", "skip head", "replay", "schedule", "keep"} {
		if n >= 20 && done[what] == 0 {
			t.Errorf("%s was never simulated", what)
		}
	}
}

// simulateOne runs a seed and returns how often which thing was done.
func simulateOne(t *testing.T, seed uint64) (done map[string]int) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(seed)
		done = s.acted
		for _, v := range s.run() {
			t.Errorf("seed %d: %s", seed, v)
		}
	})
	return done
}

// simulation is one run: relays, writers, an operator and a broker around one store.
type simulation struct {
	*scheduler
	store  *memory
	broker *simBroker
	faults bool // things die, stand still and get lost
	orders bool // the publisher is a KeyOrderer
	relays []*simRelay
	calm   bool // no more faults: what is left has to flow off

	locks     map[string]bool // keys whose business transactions are serialised
	committed map[string][]string
	ids       map[uuid.UUID]bool
	died      map[uuid.UUID]bool // messages that were dead once
	moved     map[uuid.UUID]bool // messages that are not in their key's order: scheduled, skipped, discarded
	skipped   map[uuid.UUID]bool // by an operator, maybe while their confirmation was on its way: requeued, they are sent again
	discarded map[uuid.UUID]bool
	replays   map[uuid.UUID]int
	acted     map[string]int // how often what was done, while the run was wild
	next      uint64
}

type simRelay struct {
	*process
	session *session
	ctx     context.Context
	cancel  context.CancelCauseFunc
}

const simKeys = 5

func newSimulation(seed uint64) *simulation {
	s := &simulation{
		scheduler: newScheduler(seed), store: newMemory(2 * time.Second), locks: map[string]bool{},
		committed: map[string][]string{}, ids: map[uuid.UUID]bool{}, died: map[uuid.UUID]bool{},
		moved: map[uuid.UUID]bool{}, skipped: map[uuid.UUID]bool{}, discarded: map[uuid.UUID]bool{}, replays: map[uuid.UUID]int{}, acted: map[string]int{},
	}
	s.store.hold, s.store.keep = s.chance(50), s.chance(50)
	s.faults = s.chance(85)
	s.orders = s.chance(40)
	s.broker = &simBroker{s: s, seen: map[uuid.UUID]int{}}
	return s
}

// run returns what was violated.
func (s *simulation) run() []string {
	defer s.stop()
	for range 3 {
		s.join()
	}
	writers := &process{}
	for range 4 {
		s.spawn(writers, s.write)
	}
	s.spawn(&process{}, s.operate)
	for range 6000 {
		s.advance()
		if s.faults {
			s.disturb()
		}
	}
	s.calm = true
	writers.dead = true
	for x := range s.store.open {
		x.end(false)
	}
	for _, r := range s.relays {
		r.paused = time.Time{}
	}
	s.join()
	for range 40_000 {
		if !slices.ContainsFunc(s.relays, func(r *simRelay) bool { return !r.dead }) {
			s.join() // the last one did not hear that it had joined
		}
		s.advance()
		if s.done() {
			break
		}
	}
	return s.violations()
}

// advance runs one actor, or lets time pass.
func (s *simulation) advance() {
	if !s.turn() || s.chance(5) {
		time.Sleep(time.Duration(s.random.IntN(30_000)) * time.Microsecond)
	}
	time.Sleep(time.Microsecond)
}

// disturb kills, stops, adds and removes relays.
func (s *simulation) disturb() {
	alive := slices.DeleteFunc(slices.Clone(s.relays), func(r *simRelay) bool { return r.dead })
	one := func() *simRelay { return alive[s.random.IntN(len(alive))] }
	switch dice := s.random.Float64() * 100; {
	case len(alive) == 0 || len(alive) < 4 && dice > 99.7:
		s.join()
	case dice < 0.15:
		one().dead = true
	case dice < 0.3:
		one().paused = time.Now().Add(time.Duration(s.random.IntN(5000)) * time.Millisecond)
	case dice < 0.4:
		one().cancel(nil)
	}
	if s.chance(0.1) {
		s.broker.away = time.Now().Add(time.Duration(s.random.IntN(2000)) * time.Millisecond)
	}
}

// join starts a relay: its parts as actors of one process.
func (s *simulation) join() {
	cfg := RelayConfig{
		Lease: 2 * time.Second, Batch: 20, MaxAttempts: 3, BackoffBase: 20 * time.Millisecond, BackoffMax: 200 * time.Millisecond,
		MaxWriterAge: time.Hour, Logger: slog.New(slog.DiscardHandler), random: s.random.Float64,
	}.withDefaults()
	var publisher Publisher = s.broker
	if s.orders {
		publisher = simOrderer{s.broker}
	}
	r := &simRelay{process: &process{}}
	r.ctx, r.cancel = context.WithCancelCause(context.Background())
	s.relays = append(s.relays, r)
	s.spawn(r.process, func(a *actor) {
		fault := 0.0
		if s.faults {
			fault = 1
		}
		view := func(a *actor) store { return &slow{memory: s.store, s: s.scheduler, a: a, fault: fault} }
		relay := &Relay{cfg: cfg, publisher: publisher}
		m, err := join(r.ctx, cfg, view(a))
		if err != nil {
			r.dead = true // the process ends and another is started
			return
		}
		r.session = &session{Relay: relay, member: m, ctx: r.ctx, cancel: r.cancel, gate: newGate(cfg, nil), roster: newRoster(cfg, nil, m.owner)}
		r.session.makeLanes()
		alive := len(r.session.lanes) + 4
		part := func(body func(a *actor)) {
			s.spawn(r.process, func(a *actor) {
				body(a)
				if alive--; alive == 0 {
					s.end(r, view(a))
				}
			})
		}
		part(func(a *actor) {
			r.session.gate.store = view(a)
			for r.ctx.Err() == nil {
				_ = r.session.gate.look(r.ctx, time.Now())
				s.sleep(a, r.session.gate.interval)
			}
		})
		part(func(a *actor) {
			r.session.roster.store = view(a)
			for r.ctx.Err() == nil {
				_ = r.session.roster.look(r.ctx)
				s.sleep(a, tickEvery/4)
			}
		})
		part(func(a *actor) {
			r.session.clock = &clock{store: view(a)}
			for r.ctx.Err() == nil {
				wait, _ := r.session.clock.move(r.ctx)
				s.sleep(a, wait)
			}
		})
		part(func(a *actor) {
			for r.ctx.Err() == nil {
				sent := time.Now()
				held, err := (&member{cfg, view(a), m.owner, m.lease}).renew(r.ctx)
				if err == nil && held {
					m.lease.renewed(sent)
				} else if err == nil || m.lease.left(time.Now()) <= 0 {
					r.cancel(errLeaseLost)
				}
				s.sleep(a, cfg.Renew)
			}
		})
		for _, l := range r.session.lanes {
			part(func(a *actor) {
				l.store = view(a)
				l.publisher = simCall{publisher, s.broker, a}
				for r.ctx.Err() == nil {
					worked, err := l.step(r.ctx)
					if errors.Is(err, ErrPublishStalled) {
						a.inCall.Store(false)
						r.cancel(err)
					}
					if !worked {
						s.sleep(a, 5*time.Millisecond)
					}
				}
			})
		}
	})
}

// end is what a relay does when its loops have stopped.
func (s *simulation) end(r *simRelay, view store) {
	cause := context.Cause(r.ctx)
	if !errors.Is(cause, ErrPublishStalled) && !errors.Is(cause, errLeaseLost) {
		_ = view.leave(context.Background(), r.session.member.owner)
	}
	r.dead = true
}

// write runs business transactions. Those of one key are serialised by a lock that is held until they have ended.
func (s *simulation) write(a *actor) {
	for {
		s.sleep(a, time.Duration(s.random.IntN(40))*time.Millisecond)
		key := fmt.Sprint("k", s.random.IntN(simKeys+1))
		if key == fmt.Sprint("k", simKeys) {
			key = ""
		}
		for key != "" && s.locks[key] {
			s.yield(a)
		}
		s.locks[key] = true
		tx := s.store.begin()
		var payloads []string
		for range 1 + s.random.IntN(3) {
			m := Message{ID: s.id(), Key: key, Topic: "t", Channel: DefaultChannel}
			m.Payload = []byte(m.ID.String())
			tx.enqueue(m)
			payloads = append(payloads, m.ID.String())
			s.yield(a)
		}
		if s.chance(20) {
			s.sleep(a, time.Duration(s.random.IntN(1500))*time.Millisecond)
		}
		commit := !s.chance(15)
		if commit && s.chance(10) {
			m := Message{ID: s.id(), Key: key, Topic: "t", Channel: DefaultChannel}
			m.Payload = []byte(m.ID.String())
			s.ids[m.ID], s.moved[m.ID] = true, true
			s.act("schedule", true)
			s.store.schedule(m, time.Now().Add(time.Duration(s.random.IntN(2000))*time.Millisecond))
		}
		if commit {
			s.committed[key] = append(s.committed[key], payloads...)
			for _, p := range payloads {
				s.ids[uuid.MustParse(p)] = true
			}
		}
		tx.end(commit)
		delete(s.locks, key)
	}
}

// id makes message ids that a seed repeats.
func (s *simulation) id() (id uuid.UUID) {
	s.next++
	binary.BigEndian.PutUint64(id[:], s.next)
	id[8] = 1
	return id
}

// operate does what operators do: everything while the run is wild, and what brings it to rest once it is calm.
func (s *simulation) operate(a *actor) {
	for {
		s.sleep(a, time.Duration(50+s.random.IntN(200))*time.Millisecond)
		for _, r := range sorted(s.store.dead, false, func(*memoryMessage) bool { return true }) {
			s.died[r.ID] = true
			switch {
			case s.calm || s.chance(30):
				s.store.requeue(r.ref)
				s.act("requeue", !s.calm)
			case s.chance(10):
				s.discarded[r.ID], s.moved[r.ID] = true, true
				s.store.discard(r.ref)
				s.act("discard", true)
			}
		}
		m := Message{Key: fmt.Sprint("k", s.random.IntN(simKeys))}
		k := keyRef{shardOf(&m), m.Key}
		if s.calm {
			s.store.reblock(k, "parked", "retry")
			continue
		}
		switch s.random.IntN(8) {
		case 0:
			s.act("park", s.store.park(k))
		case 1, 2:
			s.act("release", s.store.reblock(k, "parked", "retry"))
		case 3:
			s.act("retry", s.store.reblock(k, "retry", "retry"))
		case 4:
			if head := s.store.skipHead(k); head != uuid.Nil {
				s.moved[head], s.skipped[head] = true, true
				s.act("skip head", true)
			}
		case 5:
			if n := len(s.store.sent); n > 0 {
				again := s.store.sent[s.random.IntN(n)]
				s.replays[again.ID]++
				s.store.replay(again)
				s.act("replay", true)
			}
		}
	}
}

func (s *simulation) act(what string, ok bool) {
	if ok {
		s.acted[what]++
	}
}

// simBroker keeps what it has confirmed, in order.
type simBroker struct {
	s    *simulation
	away time.Time
	log  []string
	keys []string
	seen map[uuid.UUID]int
}

// simCall is the broker as one lane sees it.
type simCall struct {
	Publisher
	broker *simBroker
	lane   *actor
}

func (c simCall) Publish(_ context.Context, batch []Record) (errs []error) {
	_, keepOrder := c.Publisher.(simOrderer)
	c.broker.s.call(c.lane, func(a *actor) { errs = c.broker.publish(a, batch, keepOrder) })
	return errs
}

func (b *simBroker) Publish(context.Context, []Record) []error { panic("called without an actor") }

// publish takes messages one after the other. A process may die or stand still between any two, and what it sends when
// it goes on arrives, however late.
func (b *simBroker) publish(a *actor, batch []Record, keepOrder bool) []error {
	errs := make([]error, len(batch))
	stopped := map[string]bool{}
	for i, r := range batch {
		b.s.yield(a)
		switch {
		case keepOrder && stopped[r.Key]:
			errs[i] = ErrNotTried
		case b.s.calm:
		case b.away.After(time.Now()):
			errs[i] = Unavailable(errors.New("away"))
		case b.s.chance(5):
			errs[i] = errors.New("refused")
		case b.s.chance(1):
			errs[i] = Permanent(errors.New("bad"))
		}
		if errs[i] == nil {
			b.log, b.keys = append(b.log, string(r.Payload)), append(b.keys, r.Key)
			b.seen[r.ID]++
			if b.s.faults && !b.s.calm && b.s.chance(1) {
				errs[i] = errors.New("the confirmation was lost")
			}
		}
		stopped[r.Key] = r.Key != "" && (stopped[r.Key] || errs[i] != nil)
	}
	b.s.yield(a)
	return errs
}

type simOrderer struct{ *simBroker }

func (simOrderer) StopsKeyAtFirstFailure() bool { return true }

func (s *simulation) done() bool {
	return len(s.store.hot)+len(s.store.deferred)+len(s.store.dead)+len(s.store.keys)+len(s.store.scheduled) == 0
}

func (s *simulation) violations() (found []string) {
	if !s.done() {
		found = append(found, fmt.Sprintf("stuck: %d hot, %d deferred, %d dead, %d keys blocked", len(s.store.hot), len(s.store.deferred), len(s.store.dead), len(s.store.keys)))
	}
	copies := 0
	for id, n := range s.broker.seen {
		if !s.ids[id] {
			found = append(found, fmt.Sprintf("published %s, which was not committed", id))
		}
		if !s.skipped[id] {
			copies += n - 1 - s.replays[id]
		}
	}
	for id := range s.ids {
		if s.broker.seen[id] < 1+s.replays[id] && !s.discarded[id] {
			found = append(found, fmt.Sprintf("lost %s", id))
		}
	}
	kept := map[uuid.UUID]int{}
	for _, m := range s.store.sent {
		kept[m.ID]++
		s.act("keep", true)
	}
	for id := range s.ids {
		if n := kept[id]; s.store.keep && n != 1+s.replays[id] && !s.discarded[id] {
			found = append(found, fmt.Sprintf("kept %s %d times, replayed it %d times", id, n, s.replays[id]))
		}
	}
	if !s.faults && copies > 0 {
		found = append(found, fmt.Sprintf("%d copies without a fault", copies))
	}
	for key, want := range s.committed {
		if key == "" {
			continue
		}
		var got []string
		for i, p := range s.broker.log {
			if s.broker.keys[i] == key && !slices.Contains(got, p) {
				got = append(got, p)
			}
		}
		// Under policy skip a message that was dead comes back at the end of its key.
		elsewhere := func(p string) bool {
			id := uuid.MustParse(p)
			return s.moved[id] || !s.store.hold && s.died[id]
		}
		want, got = slices.DeleteFunc(slices.Clone(want), elsewhere), slices.DeleteFunc(got, elsewhere)
		if !slices.Equal(want, got) {
			found = append(found, fmt.Sprintf("key %s: order differs\n  committed %v\n  published %v", key, tails(want), tails(got)))
		}
	}
	return found
}

func tails(list []string) []string {
	short := make([]string, len(list))
	for i, p := range list {
		short[i] = p[14:18]
	}
	return short
}
