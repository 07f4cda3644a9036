package outbox

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
)

// A relay that is to stop begins no further call.
func TestP15_NoWaveBeginsAfterTheStop(t *testing.T) {
	m := newMemory(time.Hour)
	m.store("k", "1", "2")
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	p := &sends{}
	s := stepwise(t, m, publisherOf(func(ctx context.Context, batch []Record) []error {
		stop()
		return p.Publish(ctx, batch)
	}), RelayConfig{})
	for range 3 { // what is new shows in the second round at the latest
		_, _ = s.once(ctx) // the end of ctx is no error of the relay's
		time.Sleep(checkpointEvery)
	}
	if len(p.calls) != 1 || len(m.hot) != 1 {
		t.Errorf("sent %v, %d messages are left", p.calls, len(m.hot))
	}
}

type publisherOf func(ctx context.Context, batch []Record) []error

func (f publisherOf) Publish(ctx context.Context, batch []Record) []error { return f(ctx, batch) }

// What a relay has in mind for a key changes nothing where it is held by a dead message or parked meanwhile.
func TestA3_KeysOfAnOperatorAreLeftAlone(t *testing.T) {
	t.Parallel()
	db, s := newPostgresStore(t, time.Hour)
	owner := s.owner(t)
	s.put(t, "k", "1")
	key := s.poll(t, 10, 1<<20, 0)[0].keyRef()
	apply := func(c change) outcome {
		t.Helper()
		done, err := s.link.apply(t.Context(), owner, epochsOf(s.look(t, owner)), c)
		must(t, err)
		return done
	}
	state := func() (state string) {
		t.Helper()
		must(t, db.Pool.QueryRow(t.Context(), `select concat_ws(' ', reason, due_at, dead_id) from commitbox.outbox_blocked`).Scan(&state))
		return state
	}
	apply(change{hold: []held{{key, 7}}})
	apply(change{block: []blocked{{key, 0}}})
	apply(change{hold: []held{{key, 8}}})
	expect(t, "freed", 0, len(apply(change{unblock: []keyRef{key}}).free))
	expect(t, "held", "dead infinity 7", state())

	_, err := db.Pool.Exec(t.Context(), `update commitbox.outbox_blocked set reason = 'parked', dead_id = null`)
	must(t, err)
	apply(change{block: []blocked{{key, 0}}})
	expect(t, "freed", 0, len(apply(change{unblock: []keyRef{key}}).free))
	expect(t, "parked", "parked infinity", state())
}

// A call begins only if it is sure to have come back before the lease ends.
func TestP7_NoPublishBeginsThatTheLeaseMightNotOutlast(t *testing.T) {
	m := newMemory(time.Hour)
	m.store("k", "1")
	p := &sends{}
	s := stepwise(t, m, p, RelayConfig{})
	lane := s.lanes[0]
	remain := func(d time.Duration) { lane.lease.renewed(time.Now().Add(d - lane.lease.length)) }
	remain(lane.cfg.PublishTimeout - time.Second)
	s.steps(t, 3)
	if len(p.calls) > 0 {
		t.Fatalf("sent %v with less than PublishTimeout left", p.calls)
	}
	remain(lane.cfg.PublishTimeout + time.Minute)
	lane.rested = time.Time{}
	s.steps(t, 1)
	if len(p.calls) != 1 {
		t.Errorf("%d calls with more than PublishTimeout left", len(p.calls))
	}
}

// longNote is a store in which writing down what is about to be tried takes long.
type longNote struct {
	*memory
	meanwhile func()
}

func (n *longNote) connect(context.Context) (link, error) { return n, nil }

func (n *longNote) apply(ctx context.Context, owner uuid.UUID, epochs map[int16]int64, c change) (outcome, error) {
	if len(c.probes) > 0 {
		n.meanwhile()
	}
	return n.memory.apply(ctx, owner, epochs, c)
}

// The lease may end between the look at it and the call: while the relay notes what is about to be tried.
func TestP7_NoPublishBeginsAfterANoteThatOutlastedTheLease(t *testing.T) {
	m := &longNote{memory: newMemory(time.Hour)}
	m.store("k", "1")
	p := &sends{}
	s := stepwise(t, m, p, RelayConfig{})
	lane := s.lanes[0]
	for i := range int16(shards) {
		lane.probation[i] = lane.cfg.Batch
	}
	m.meanwhile = func() { lane.lease.renewed(time.Now().Add(-lane.lease.length)) }
	s.steps(t, 3)
	if len(p.calls) > 0 {
		t.Fatalf("sent %v after the lease had ended", p.calls)
	}
	lane.lease.renewed(time.Now())
	m.meanwhile, lane.rested = func() {}, time.Time{}
	s.steps(t, 1)
	if len(p.calls) != 1 {
		t.Errorf("%d calls under a lease", len(p.calls))
	}
}

// deaf is a store whose delete of confirmed messages fails.
type deaf struct {
	*memory
	fails bool
	asked int
}

func (d *deaf) connect(context.Context) (link, error) { return d, nil }

func (d *deaf) confirm(ctx context.Context, confirmed []found, keep bool) error {
	d.asked++
	if d.fails {
		return errAway
	}
	return d.memory.confirm(ctx, confirmed, keep)
}

func (d *deaf) settle(ctx context.Context, owner uuid.UUID, epochs map[int16]int64, confirmed []found, keep bool, followers []found) ([]int16, error) {
	d.asked++
	if d.fails {
		return nil, errAway
	}
	return d.memory.settle(ctx, owner, epochs, confirmed, keep, followers)
}

// Until the delete of what was confirmed is acknowledged, nothing is read and nothing sent, over new connections too.
func TestP3_NothingIsDoneBeforeWhatWasConfirmedIsDeleted(t *testing.T) {
	d := &deaf{memory: newMemory(time.Hour), fails: true}
	d.store("k", "1")
	p := &sends{}
	s := stepwise(t, d, p, RelayConfig{})
	for range 5 {
		if _, err := s.once(t.Context()); err != nil && !errors.Is(err, errAway) {
			t.Fatal(err)
		}
		time.Sleep(checkpointEvery)
	}
	if len(p.calls) != 1 || d.asked < 3 {
		t.Errorf("sent %v, and asked %d times for the delete", p.calls, d.asked)
	}
	d.fails = false
	s.steps(t, 3)
	if len(p.calls) != 1 || len(d.hot) > 0 {
		t.Errorf("sent %v; %d messages are left", p.calls, len(d.hot))
	}
}

// unsure is a store whose renewals do not hold.
type unsure struct {
	*memory
	err error
}

func (u unsure) renew(context.Context, uuid.UUID) (bool, error) { return false, u.err }

// The heartbeat gives the lease up at once if the database says that it has ended, and when its time is over if nothing
// is heard.
func TestP7_TheHeartbeatGivesUpALostLease(t *testing.T) {
	t.Parallel()
	for _, answer := range []error{nil, errAway} {
		synctest.Test(t, func(t *testing.T) {
			cfg := RelayConfig{Logger: slog.New(slog.DiscardHandler)}.withDefaults()
			m, err := join(t.Context(), cfg, unsure{newMemory(time.Hour), answer})
			must(t, err)
			bounded, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			ctx, lose := context.WithCancelCause(bounded)
			defer lose(nil)
			start := time.Now()
			m.beat(ctx, lose)
			took, least, most := time.Since(start), cfg.Renew, cfg.Renew
			if answer != nil {
				least, most = m.lease.length, m.lease.length+cfg.Renew
			}
			if cause := context.Cause(ctx); !errors.Is(cause, errLeaseLost) || !errors.Is(cause, answer) && answer != nil || took < least || took > most {
				t.Errorf("%v: %v after %s", answer, cause, took)
			}
		})
	}
}
