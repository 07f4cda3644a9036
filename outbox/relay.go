package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// Relay publishes the messages of one channel. Any number of relays may run for a channel, in any number of processes:
// they share its shards evenly, hand shards over as relays come and go, and take over those of a relay that has died
// once its lease has ended. All messages of one key are in one shard. Not promised: that two relays never send one
// message: one that stands still past its lease may send a copy when it goes on.
type Relay struct {
	cfg       RelayConfig
	publisher Publisher
	open      func(context.Context) (store, func(), error)

	mu     sync.Mutex // held by Run, RunOnce and Close
	manual *manual    // what RunOnce keeps until Close
}

// NewRelay returns a relay; it touches the database when it runs. The relay opens connections of its own with the
// settings of pool, one for each lane and five more, so that a busy pool cannot cost it its lease. The error names every
// bad field of cfg.
func NewRelay(pool *pgxpool.Pool, publisher Publisher, cfg RelayConfig) (*Relay, error) {
	cfg = cfg.withDefaults()
	err := cfg.check()
	if pool == nil {
		err = errors.Join(err, errors.New("pool is nil"))
	}
	if publisher == nil {
		err = errors.Join(err, errors.New("publisher is nil"))
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: relay configuration: %w", err)
	}
	open := func(ctx context.Context) (store, func(), error) { return openPostgres(ctx, pool, cfg) }
	return &Relay{cfg: cfg, publisher: publisher, open: open}, nil
}

// ErrRunning refuses a second Run, RunOnce or Close at the same time.
var ErrRunning = errors.New("outbox: relay is already in use")

// Run publishes until ctx ends. It then takes no new work, waits for the Publish calls that are under way, settles their
// messages, hands its shards over and returns nil; or an error that says what it could not hand over. That takes at most
// PublishTimeout and Guard, and some 20 s more if the database does not answer. While the database
// is away it keeps trying, up to two seconds apart. The only other error is [ErrPublishStalled]. Not promised: that a
// relay which ended with an error has handed anything over: its shards are free when its lease has ended.
func (r *Relay) Run(ctx context.Context) error {
	if !r.mu.TryLock() {
		return ErrRunning
	}
	defer r.mu.Unlock()
	if r.manual != nil {
		return fmt.Errorf("%w by RunOnce; call Close first", ErrRunning)
	}
	store, closeStore, err := r.open(ctx)
	if err != nil {
		return err
	}
	defer closeStore()
	for failures := 0; ; {
		s, err := newSession(ctx, r, store)
		if err == nil {
			failures = 0
			err = s.run()
		}
		if ctx.Err() != nil || errors.Is(err, ErrPublishStalled) {
			return ignoreEnd(ctx, err)
		}
		failures++
		delay := reconnect.next(failures)
		r.cfg.Logger.Error("outbox: relay starts again", "channel", r.cfg.Channel, "error", err, "in", delay)
		sleep(ctx, delay)
	}
}

// ignoreEnd drops an error that only says that ctx has ended.
func ignoreEnd(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return nil
	}
	return err
}

// manual is what RunOnce keeps.
type manual struct {
	session *session
	close   func()
}

// RunOnce does one round in every lane and returns how many messages were confirmed. The first call joins the channel's
// relays; from then on the relay renews its lease in the background, until [Relay.Close]. It serves the shards that it
// has got by then, none while other relays still hold them. After an error the next call joins anew. Not promised: that
// nothing is left when it returns 0: messages may be blocked, not due, or another relay's.
func (r *Relay) RunOnce(ctx context.Context) (int, error) {
	if !r.mu.TryLock() {
		return 0, ErrRunning
	}
	defer r.mu.Unlock()
	if r.manual == nil {
		if err := r.startManual(ctx); err != nil {
			return 0, err
		}
	}
	published, err := r.manual.session.once(ctx)
	if err != nil {
		return published, errors.Join(err, r.stopManual(err))
	}
	return published, nil
}

func (r *Relay) startManual(ctx context.Context) error {
	store, closeStore, err := r.open(ctx)
	if err != nil {
		return err
	}
	s, err := newSession(context.WithoutCancel(ctx), r, store)
	if err != nil {
		closeStore()
		return err
	}
	r.manual = &manual{s, closeStore}
	return nil
}

func (r *Relay) stopManual(cause error) error {
	m := r.manual
	r.manual = nil
	if m == nil {
		return nil
	}
	defer m.close()
	m.session.cancel(cause)
	return m.session.end()
}

// Close hands over what [Relay.RunOnce] has joined; the next RunOnce joins anew. It is not needed after Run. Not promised:
// that it ends a Run or RunOnce under way, it refuses with [ErrRunning]; and that the shards are free if it returns another
// error: they are when the lease has ended.
func (r *Relay) Close() error {
	if !r.mu.TryLock() {
		return ErrRunning
	}
	defer r.mu.Unlock()
	return r.stopManual(nil)
}

// session is one incarnation of a relay: from joining to leaving, under one owner id.
type session struct {
	*Relay
	store   store
	member  *member
	gate    *gate
	roster  *roster
	clock   *clock
	lanes   []*lane
	ctx     context.Context // ends with the caller's, or with a cause when the session cannot go on
	cancel  context.CancelCauseFunc
	beating chan struct{} // closed when the heartbeat has stopped
}

func newSession(ctx context.Context, r *Relay, store store) (*session, error) {
	m, err := join(ctx, r.cfg, store)
	if err != nil {
		return nil, err
	}
	s := &session{Relay: r, store: store, member: m, gate: newGate(r.cfg, store), roster: newRoster(r.cfg, store, m.owner), clock: &clock{store: store}, beating: make(chan struct{})}
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	s.makeLanes()
	go func() {
		defer close(s.beating)
		m.beat(s.ctx, s.cancel)
	}()
	return s, nil
}

func (s *session) makeLanes() {
	orderer, ok := s.publisher.(KeyOrderer)
	breaker := newBreaker(s.cfg)
	for i := range s.cfg.Lanes {
		s.lanes = append(s.lanes, &lane{
			cfg: s.cfg, publisher: s.publisher, keepsOrder: ok && orderer.StopsKeyAtFirstFailure(),
			store: s.store, owner: s.member.owner, lease: s.member.lease, gate: s.gate, roster: s.roster, breaker: breaker, index: i,
			policy:   policy{maxAttempts: s.cfg.MaxAttempts, backoff: backoff{s.cfg.BackoffBase, s.cfg.BackoffMax, s.cfg.random}.next},
			suspects: make(map[ref]int), awayTopics: make(map[string]bool), probation: make(map[int16]int), accused: make(map[ref]bool), examined: make(map[int16]bool),
		})
	}
}

// run serves until the session's context ends, and leaves.
func (s *session) run() error {
	var group sync.WaitGroup
	group.Go(func() {
		s.gate.run(s.ctx, func(err error) { s.report(err, "gate") })
	})
	group.Go(func() {
		s.roster.run(s.ctx, func(err error) { s.report(err, "roster") })
	})
	group.Go(func() {
		s.clock.run(s.ctx, func(err error) { s.report(err, "clock") })
	})
	for _, l := range s.lanes {
		group.Go(func() { s.serve(l) })
	}
	group.Wait()
	return s.end()
}

// serve runs a lane until the session ends.
func (s *session) serve(l *lane) {
	defer l.forget()
	for failures := 0; s.ctx.Err() == nil; {
		_, news := s.gate.view()
		_, assigned := s.roster.assigned()
		worked, err := l.step(s.ctx)
		switch {
		case errors.Is(err, ErrPublishStalled):
			s.cancel(err)
		case err != nil && s.ctx.Err() == nil:
			failures++
			s.report(err, "lane")
			sleep(s.ctx, reconnect.next(failures))
		case worked:
			failures = 0
		default:
			failures = 0
			l.wait(s.ctx, news, assigned)
		}
	}
}

// wait pauses until the gate has news, another assignment is there, or the time of the lane's next appointment.
func (l *lane) wait(ctx context.Context, news, assigned <-chan struct{}) {
	until := never
	switch {
	case len(l.shards) == 0:
	case time.Now().Before(l.rested):
		until, news = l.rested, nil
	case l.nextDue.Before(l.nextSweep):
		until = l.nextDue
	default:
		until = l.nextSweep
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-news:
	case <-assigned:
	case <-timer.C:
	}
}

// once does one round.
func (s *session) once(ctx context.Context) (published int, err error) {
	if _, err := s.clock.move(ctx); err != nil {
		return 0, err
	}
	if err := s.gate.look(ctx, time.Now()); err != nil {
		return 0, err
	}
	if err := s.roster.look(ctx); err != nil {
		return 0, err
	}
	for _, l := range s.lanes {
		before := l.published
		_, err := l.step(ctx)
		published += l.published - before
		if err = errors.Join(err, context.Cause(s.ctx)); err != nil {
			return published, err
		}
	}
	return published, nil
}

// end stops the heartbeat and hands the shards over, unless they are not the relay's any more or a call may still send.
func (s *session) end() error {
	<-s.beating
	unsettled := 0
	for _, l := range s.lanes {
		unsettled += len(l.unconfirmed)
		l.forget()
	}
	s.gate.close()
	s.roster.close()
	s.clock.close()
	cause := context.Cause(s.ctx)
	if errors.Is(cause, ErrPublishStalled) || errors.Is(cause, errLeaseLost) {
		return cause
	}
	if err := s.member.leave(s.ctx); err != nil {
		return fmt.Errorf("outbox: shards of channel %s were not handed over, they are free in %v; %d confirmed messages will be sent again: %w",
			s.cfg.Channel, s.cfg.Lease, unsettled, err)
	}
	return nil
}
