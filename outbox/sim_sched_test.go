package outbox

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
)

// scheduler runs actors one at a time. Each runs until it yields; then the next is drawn from a seeded source. So a run
// is an interleaving that its seed repeats, and every yield is a place where a process can die or stand still.
type scheduler struct {
	random *rand.Rand
	actors []*actor
	parked chan struct{} // the running actor has yielded or ended
	quit   bool
}

type actor struct {
	process *process
	grant   chan struct{}
	running atomic.Bool // it has the turn
	inCall  atomic.Bool // it waits for an actor of its own to return, see call
	ended   bool
	asleep  atomic.Int64 // not to be run before, in nanoseconds
}

// process is what dies or stands still as a whole.
type process struct {
	dead   bool
	paused time.Time // until
}

func newScheduler(seed uint64) *scheduler {
	return &scheduler{random: rand.New(&lockedSource{source: rand.NewPCG(seed, 1)}), parked: make(chan struct{})}
}

// lockedSource may be asked by a lane that has given up a call, while nobody has the turn.
type lockedSource struct {
	mu     sync.Mutex
	source rand.Source
}

func (l *lockedSource) Uint64() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.source.Uint64()
}

func (s *scheduler) chance(percent float64) bool { return s.random.Float64()*100 < percent }

// spawn adds an actor. body gets the actor and runs under grants only.
func (s *scheduler) spawn(p *process, body func(*actor)) {
	a := s.add(p)
	go func() {
		defer func() {
			if !a.running.Load() { // it gave up a call that has the turn
				<-a.grant
			}
			a.ended = true
			s.parked <- struct{}{}
		}()
		<-a.grant
		a.running.Store(true)
		if !s.quit && !p.dead {
			body(a)
		}
	}()
}

func (s *scheduler) add(p *process) *actor {
	a := &actor{process: p, grant: make(chan struct{})}
	s.actors = append(s.actors, a)
	return a
}

// yield hands control back. It does not return in a process that has died.
func (s *scheduler) yield(a *actor) {
	if a.running.Swap(false) {
		s.parked <- struct{}{}
	}
	<-a.grant
	a.running.Store(true)
	if s.quit || a.process.dead {
		runtime.Goexit()
	}
}

// call runs body on another goroutine than the caller's, as an actor of its own that has the turn until it returns. The
// caller waits for it, but may give up; then what the call still does is done without it.
func (s *scheduler) call(caller *actor, body func(*actor)) {
	if !caller.running.Load() { // all is ending
		runtime.Goexit()
	}
	a := s.add(caller.process)
	caller.running.Store(false)
	a.running.Store(true)
	caller.inCall.Store(true)
	defer func() {
		a.ended = true
		if caller.inCall.Swap(false) && !s.quit {
			caller.running.Store(true)
			return
		}
		s.parked <- struct{}{}
	}()
	body(a)
}

// sleep yields until a while has passed.
func (s *scheduler) sleep(a *actor, d time.Duration) {
	a.asleep.Store(time.Now().Add(d).UnixNano())
	s.yield(a)
}

// turn gives one actor a turn; false: none can run now.
func (s *scheduler) turn() bool {
	now := time.Now()
	var ready []*actor
	for _, a := range s.actors {
		if !a.ended && !a.inCall.Load() && !a.process.dead && a.asleep.Load() <= now.UnixNano() && !a.process.paused.After(now) {
			ready = append(ready, a)
		}
	}
	if len(ready) == 0 {
		return false
	}
	a := ready[s.random.IntN(len(ready))]
	a.grant <- struct{}{}
	<-s.parked
	return true
}

// stop ends all actors; those that are called before their callers.
func (s *scheduler) stop() {
	s.quit = true
	for left := true; left; {
		left = false
		for _, a := range s.actors {
			if left = left || !a.ended; !a.ended && !a.inCall.Load() {
				a.grant <- struct{}{}
				<-s.parked
			}
		}
	}
}

var errAnswerLost = errors.New("the connection broke")

// slow is a store as one actor of a process sees it: every call is a place to stop before and after, and its answer may
// be lost.
type slow struct {
	*memory
	s     *scheduler
	a     *actor
	fault float64 // percentage of answers that are lost

	polled []row // the last answer of poll
}

func pass[T any](w *slow, op func() (T, error)) (T, error) {
	w.s.yield(w.a)
	v, err := op()
	w.s.yield(w.a)
	if err == nil && w.s.chance(w.fault) {
		var zero T
		return zero, errAnswerLost
	}
	return v, err
}

func effect(w *slow, op func() error) error {
	_, err := pass(w, func() (struct{}, error) { return struct{}{}, op() })
	return err
}

func (w *slow) join(ctx context.Context, o uuid.UUID) error {
	return effect(w, func() error { return w.memory.join(ctx, o) })
}

func (w *slow) claim(ctx context.Context, o uuid.UUID) error {
	return effect(w, func() error { return w.memory.claim(ctx, o) })
}

func (w *slow) release(ctx context.Context, o uuid.UUID, g []holding) error {
	return effect(w, func() error { return w.memory.release(ctx, o, g) })
}

func (w *slow) renew(ctx context.Context, o uuid.UUID) (bool, error) {
	return pass(w, func() (bool, error) { return w.memory.renew(ctx, o) })
}

func (w *slow) leave(ctx context.Context, o uuid.UUID) error {
	return effect(w, func() error { return w.memory.leave(ctx, o) })
}
func (w *slow) connect(context.Context) (link, error) { return w, nil }
func (w *slow) position(ctx context.Context) (int64, error) {
	return pass(w, func() (int64, error) { return w.memory.position(ctx) })
}

func (w *slow) writers(ctx context.Context) ([]writer, error) {
	return pass(w, func() ([]writer, error) { return w.memory.writers(ctx) })
}

func (w *slow) look(ctx context.Context, o uuid.UUID) (surroundings, error) {
	return pass(w, func() (surroundings, error) { return w.memory.look(ctx, o) })
}

// poll writes over the rows of the poll before, as a link may.
func (w *slow) poll(ctx context.Context, from []cursor, bytes int64) ([]row, error) {
	for i := range w.polled {
		w.polled[i] = row{bad: errors.New("read by a poll before"), ref: ref{shard: -1}}
	}
	rows, err := pass(w, func() ([]row, error) { return w.memory.poll(ctx, from, bytes) })
	w.polled = rows
	return rows, err
}

func (w *slow) blocked(ctx context.Context, of []int16) ([]keyRef, error) {
	return pass(w, func() ([]keyRef, error) { return w.memory.blocked(ctx, of) })
}

func (w *slow) due(ctx context.Context, of []int16, keys, perKey int, bytes int64) ([]row, error) {
	return pass(w, func() ([]row, error) { return w.memory.due(ctx, of, keys, perKey, bytes) })
}

func (w *slow) read(ctx context.Context, at []ref) ([]row, error) {
	return pass(w, func() ([]row, error) { return w.memory.read(ctx, at) })
}

func (w *slow) drained(ctx context.Context, of []int16, keys int) ([]keyRef, error) {
	return pass(w, func() ([]keyRef, error) { return w.memory.drained(ctx, of, keys) })
}

func (w *slow) confirm(ctx context.Context, c []found, keep bool) error {
	return effect(w, func() error { return w.memory.confirm(ctx, c, keep) })
}

func (w *slow) settle(ctx context.Context, o uuid.UUID, e map[int16]int64, c []found, keep bool, f []found) ([]int16, error) {
	return pass(w, func() ([]int16, error) { return w.memory.settle(ctx, o, e, c, keep, f) })
}

func (w *slow) moveScheduled(ctx context.Context, atMost int) (moved int, nextIn time.Duration, err error) {
	moved, err = pass(w, func() (n int, err error) {
		n, nextIn, err = w.memory.moveScheduled(ctx, atMost)
		return n, err
	})
	return moved, nextIn, err
}

func (w *slow) apply(ctx context.Context, o uuid.UUID, e map[int16]int64, c change) (outcome, error) {
	return pass(w, func() (outcome, error) { return w.memory.apply(ctx, o, e, c) })
}
