package outbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/google/uuid"
)

// Sessions over the store in memory, taken step by step.

// sends is a publisher that keeps the payloads of each call, and refuses those that are named.
type sends struct {
	calls  [][]string
	refuse map[string]bool
}

func (p *sends) Publish(_ context.Context, batch []Record) []error {
	var call []string
	errs := make([]error, len(batch))
	for i, r := range batch {
		call = append(call, string(r.Payload))
		if p.refuse[string(r.Payload)] {
			errs[i] = errors.New("refused")
		}
	}
	p.calls = append(p.calls, call)
	return errs
}

func (p *sends) has(payload string) bool {
	for _, call := range p.calls {
		for _, sent := range call {
			if sent == payload {
				return true
			}
		}
	}
	return false
}

func stepwise(t *testing.T, m store, p Publisher, cfg RelayConfig) *session {
	t.Helper()
	cfg.Lease, cfg.Lanes, cfg.Logger = time.Hour, 1, slog.New(slog.DiscardHandler)
	s, err := newSession(t.Context(), &Relay{cfg: cfg.withDefaults(), publisher: p}, m)
	must(t, err)
	t.Cleanup(func() {
		s.cancel(nil)
		_ = s.end()
	})
	return s
}

func (s *session) steps(t *testing.T, n int) {
	t.Helper()
	for range n {
		_, err := s.once(t.Context())
		must(t, err)
		time.Sleep(checkpointEvery)
	}
}

// store puts messages into hot and returns the shard of the last.
func (s *memory) store(key string, payloads ...string) (shard int16) {
	for _, p := range payloads {
		x := s.begin()
		m := Message{ID: uuid.New(), Channel: DefaultChannel, Topic: "t", Key: key, Payload: []byte(p)}
		x.enqueue(m)
		x.end(true)
		shard = shardOf(&m)
	}
	return shard
}

// keysOf returns keys of one shard.
func keysOf(shard int16, n int) (keys []string) {
	for i := 0; len(keys) < n; i++ {
		if key := fmt.Sprint("k", i); shardOf(&Message{Key: key}) == shard {
			keys = append(keys, key)
		}
	}
	return keys
}

// A shard that is found lost in the middle of a round: nothing of it is changed, and what was read of the others counts as theirs.
func TestP7_AShardLostInTheMiddleOfARound(t *testing.T) {
	m, p := newMemory(time.Hour), &sends{refuse: map[string]bool{"head": true}}
	s := stepwise(t, m, p, RelayConfig{Batch: shards, BackoffBase: time.Hour, BackoffMax: time.Hour}) // one row of each shard
	lost, kept := keysOf(3, 2), keysOf(40, 6)
	m.store(lost[0], "head")
	s.steps(t, 3)
	if !p.has("head") || len(m.keys) != 1 {
		t.Fatalf("the head was not refused: %v", p.calls)
	}
	s.lanes[0].find(3).limit = 2
	m.store(lost[0], "follower")
	m.store(lost[1], "of the lost shard")
	for i, key := range kept {
		m.store(key, fmt.Sprint("kept", i))
	}
	time.Sleep(checkpointEvery)
	must(t, s.gate.look(t.Context(), time.Now()))
	m.shards[3].owner, m.shards[3].epoch = uuid.New(), m.shards[3].epoch+1 // somebody took it over just now
	_, err := s.lanes[0].step(t.Context())
	must(t, err)
	if s.lanes[0].find(3) != nil || len(m.deferred) != 1 {
		t.Errorf("the shard is still used: %v; %d messages are deferred, not the head alone", s.lanes[0].find(3) != nil, len(m.deferred))
	}
	s.steps(t, 8)
	for i := range kept {
		if !p.has(fmt.Sprint("kept", i)) {
			t.Errorf("message %d of another shard was passed by: %v", i, p.calls)
		}
	}
}

// A message that a dead relay had noted is tried alone. Once it has been, the note is struck, so that nobody blames it for
// another death, and when what was in flight has been tried, the probation ends.
func TestH2_ProbationEndsForWhatSurvives(t *testing.T) {
	m, p := newMemory(time.Hour), &sends{}
	former := uuid.New()
	must(t, m.join(t.Context(), former))
	must(t, m.claim(t.Context(), former))
	shard := m.store("k", "noted")
	m.store("k", "next")
	for at := range m.hot {
		if string(m.hot[at].Payload) == "noted" {
			m.shards[shard].note = probe{shard: shard, id: at.id}
		}
	}
	delete(m.relays, former) // it died, and its lease has ended
	s := stepwise(t, m, p, RelayConfig{Batch: 2})
	for range 5 {
		if p.has("noted") {
			break
		}
		s.steps(t, 1)
	}
	if !p.has("noted") || len(p.calls[0]) != 1 {
		t.Fatalf("sent %v, want the noted one alone", p.calls)
	}
	if m.shards[shard].note.alone || len(s.lanes[0].accused) != 0 {
		t.Errorf("after it survived: note %+v, accused %v", m.shards[shard].note, s.lanes[0].accused)
	}
	s.steps(t, 4)
	for i := range m.shards {
		if m.shards[i].unclean {
			t.Fatalf("shard %d is still on probation after %v", i, p.calls)
		}
	}
	if len(s.lanes[0].probation) != 0 {
		t.Errorf("the lane still has %v on probation", s.lanes[0].probation)
	}
}

// A relay whose lease has ended owns nothing: it hands nothing over, because another may have joined in its place.
func TestP7_NothingIsHandedOverAfterTheLease(t *testing.T) {
	for cause, want := range map[error]bool{errLeaseLost: true, ErrPublishStalled: true, nil: false} {
		m := newMemory(time.Hour)
		s := stepwise(t, m, &sends{}, RelayConfig{})
		s.steps(t, 2)
		s.cancel(cause)
		if err := s.end(); !errors.Is(err, cause) {
			t.Errorf("%v: the session ended with %v", cause, err)
		}
		if _, still := m.relays[s.member.owner]; still != want {
			t.Errorf("%v: is a member still %v, want %v", cause, still, want)
		}
	}
}

// slowJoin is a store that takes its time to answer.
type slowJoin struct{ *memory }

const joinTook = 200 * time.Millisecond

func (s slowJoin) join(ctx context.Context, owner uuid.UUID) error {
	defer time.Sleep(joinTook)
	return s.memory.join(ctx, owner)
}

// The lease counts from before it was asked for: the database may have granted it at once and answered late.
func TestH8_TheLeaseCountsFromTheQuestion(t *testing.T) {
	cfg := RelayConfig{Logger: slog.New(slog.DiscardHandler)}.withDefaults()
	m, err := join(t.Context(), cfg, slowJoin{newMemory(time.Hour)})
	must(t, err)
	if left := m.lease.left(time.Now()); left > m.lease.length-joinTook {
		t.Errorf("%v of %v are left after an answer that took %v", left, m.lease.length, joinTook)
	}
}

// broken is a link that does not answer.
type broken struct{ *memory }

var errAway = errors.New("connection lost")

func (broken) position(context.Context) (int64, error) { return 0, errAway }

// Another server may answer after a connection has failed: its floors are void before it is asked.
func TestA1_AQuestionThatFailsVoidsTheFloors(t *testing.T) {
	m := newMemory(time.Hour)
	m.store("k", "1")
	g := newGate(RelayConfig{}.withDefaults(), m)
	must(t, g.look(t.Context(), time.Now()))
	before, _ := g.view()
	g.link = broken{m}
	if err := g.look(t.Context(), time.Now()); !errors.Is(err, errAway) {
		t.Fatal(err)
	}
	if after, _ := g.view(); after.generation == before.generation || after.resolved != 0 || before.resolved == 0 {
		t.Errorf("after the failure: %+v, before: %+v", after, before)
	}
}

// A confirmation of a former owner's may come when the message has been deferred or declared dead: it was delivered, so it
// is deleted there, and kept if the channel keeps.
func TestA5_AConfirmationDeletesWhereverTheMessageLies(t *testing.T) {
	t.Parallel()
	for _, keep := range []bool{false, true} {
		db, s, owner := ownedStore(t)
		must(t, s.sentDays(t.Context()))
		s.put(t, "a", "hot")
		s.put(t, "b", "deferred")
		s.put(t, "c", "dead")
		rows := s.poll(t, 10, 1<<20, 0)
		var c change
		var confirmed []found
		for i := range rows {
			confirmed = append(confirmed, found{rows[i].ref, rows[i].ID, rows[i].place})
			switch string(rows[i].Payload) {
			case "deferred":
				c.block, c.deferred = []blocked{{rows[i].keyRef(), time.Hour}}, []failure{{ref: rows[i].ref, attempts: 1, text: "x", delay: time.Hour}}
			case "dead":
				c.buried = []failure{{ref: rows[i].ref, text: "x"}}
			}
		}
		_, err := s.link.apply(t.Context(), owner, epochsOf(s.look(t, owner)), c)
		must(t, err)
		must(t, s.link.confirm(t.Context(), confirmed, keep))
		var left string
		must(t, db.Pool.QueryRow(t.Context(), `select format('hot %s, deferred %s, dead %s, sent %s', (select count(*) from commitbox.outbox_message),
			(select count(*) from commitbox.outbox_deferred), (select count(*) from commitbox.outbox_dead), (select count(*) from commitbox.outbox_sent))`).Scan(&left))
		expect(t, fmt.Sprint("left, keep ", keep), map[bool]string{false: "hot 0, deferred 0, dead 0, sent 0", true: "hot 0, deferred 0, dead 0, sent 3"}[keep], left)
	}
}
