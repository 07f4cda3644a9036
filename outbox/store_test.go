package outbox

import (
	"cmp"
	"context"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/commitbox/commitbox/internal/testenv"
)

// The contract that the store in PostgreSQL and the one of the simulation both keep. What the simulation shows of the
// relay holds for PostgreSQL as far as this does.

// contractStore is a store under test, with the business side of it.
type contractStore struct {
	store
	link    link
	enqueue func(t *testing.T, commit bool, messages ...Message) (end func())
	setHold func(t *testing.T)
}

const contractLease = 1500 * time.Millisecond

func eachStore(t *testing.T, run func(t *testing.T, s contractStore)) {
	t.Run("memory", func(t *testing.T) {
		m := newMemory(contractLease)
		run(t, contractStore{store: m, link: m, setHold: func(*testing.T) { m.hold = true }, enqueue: func(t *testing.T, commit bool, messages ...Message) func() {
			x := m.begin()
			for _, msg := range messages {
				msg.ID, msg.Channel = uuid.New(), DefaultChannel
				x.enqueue(msg)
			}
			return func() { x.end(commit) }
		}})
	})
	t.Run("postgres", func(t *testing.T) {
		t.Parallel()
		_, s := newPostgresStore(t, contractLease)
		run(t, s)
	})
}

// newPostgresStore opens the store in a database of the test's own.
func newPostgresStore(t *testing.T, lease time.Duration) (*testenv.DB, contractStore) {
	t.Helper()
	db := testenv.Database(t)
	s, closeStore, err := openPostgres(t.Context(), db.Pool, RelayConfig{Lease: lease}.withDefaults())
	must(t, err)
	t.Cleanup(closeStore)
	l, err := s.connect(t.Context())
	must(t, err)
	t.Cleanup(l.close)
	must(t, s.join(t.Context(), uuid.New())) // makes the channel's rows
	_, err = db.Pool.Exec(t.Context(), "delete from commitbox.outbox_relay")
	must(t, err)
	hold := func(t *testing.T) {
		_, err := db.Pool.Exec(t.Context(), "update commitbox.outbox_channel set dead_policy = 'hold'")
		must(t, err)
	}
	enqueue := func(t *testing.T, commit bool, messages ...Message) func() {
		tx, err := db.Pool.Begin(t.Context())
		must(t, err)
		for _, m := range messages {
			_, err := Enqueue(t.Context(), tx, m)
			must(t, err)
		}
		return func() {
			if commit {
				must(t, tx.Commit(context.WithoutCancel(t.Context())))
			} else {
				must(t, tx.Rollback(context.WithoutCancel(t.Context())))
			}
		}
	}
	return db, contractStore{store: s, link: l, setHold: hold, enqueue: enqueue}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (s contractStore) look(t *testing.T, owner uuid.UUID) surroundings {
	t.Helper()
	around, err := s.link.look(t.Context(), owner)
	must(t, err)
	return around
}

// owner joins a relay and claims its share.
func (s contractStore) owner(t *testing.T) uuid.UUID {
	t.Helper()
	owner := uuid.New()
	must(t, s.join(t.Context(), owner))
	time.Sleep(2 * time.Millisecond) // two relays never join at the same instant
	must(t, s.claim(t.Context(), owner))
	return owner
}

func (s contractStore) put(t *testing.T, key string, payloads ...string) {
	t.Helper()
	var messages []Message
	for _, p := range payloads {
		messages = append(messages, Message{Topic: "t", Key: key, Payload: []byte(p)})
	}
	s.enqueue(t, true, messages...)()
}

// poll reads everything.
func (s contractStore) poll(t *testing.T, limit int32, bytes, floor int64) []row {
	t.Helper()
	var from []cursor
	for i := range int16(shards) {
		from = append(from, cursor{i, floor, limit})
	}
	rows, err := s.link.poll(t.Context(), from, bytes)
	must(t, err)
	return slices.Clone(rows)
}

func texts(rows []row) []string {
	list := []string{}
	for _, r := range rows {
		list = append(list, string(r.Payload))
	}
	return list
}

func (s contractStore) due(t *testing.T) []string {
	t.Helper()
	rows, err := s.link.due(t.Context(), allShards(), 100, 100, 1<<20)
	must(t, err)
	return texts(rows)
}

func allShards() []int16 {
	var list []int16
	for i := range int16(shards) {
		list = append(list, i)
	}
	return list
}

func epochsOf(around surroundings) map[int16]int64 {
	epochs := map[int16]int64{}
	for _, h := range around.held {
		epochs[h.shard] = h.epoch
	}
	return epochs
}

func expect(t *testing.T, what string, want, got any) {
	t.Helper()
	if diff := gocmp.Diff(want, got, gocmp.AllowUnexported(outcome{}, keyRef{}, probe{}, holding{})); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestStoreMembership(t *testing.T) {
	eachStore(t, func(t *testing.T, s contractStore) {
		a := s.owner(t)
		around := s.look(t, a)
		expect(t, "alone: shards", 64, len(around.held))
		expect(t, "alone: free", 0, around.free)
		expect(t, "alone: unclean", map[int16]probe{}, around.unclean)
		b := s.owner(t)
		around = s.look(t, b)
		expect(t, "second: shards before the first gave any", 0, len(around.held))
		expect(t, "second: members and rank", []int{2, 1}, []int{around.members, around.rank})
		held := s.look(t, a).held
		must(t, s.release(t.Context(), a, held[32:]))
		stale := held[0]
		stale.epoch--
		must(t, s.release(t.Context(), a, []holding{stale}))
		expect(t, "first: shards after it gave 32", 32, len(s.look(t, a).held))
		must(t, s.claim(t.Context(), b))
		around = s.look(t, b)
		expect(t, "second: shards", 32, len(around.held))
		expect(t, "second: unclean", map[int16]probe{}, around.unclean)
		if around.held[0].epoch <= held[63].epoch {
			t.Errorf("epoch %d after %d", around.held[0].epoch, held[63].epoch)
		}
		for range 4 { // b stays, a does not
			time.Sleep(contractLease / 3)
			renewed, err := s.renew(t.Context(), b)
			must(t, err)
			expect(t, "second renews", true, renewed)
		}
		renewed, err := s.renew(t.Context(), a)
		must(t, err)
		expect(t, "first renews after its lease", false, renewed)
		expect(t, "an expired relay is seen", true, s.look(t, b).expired)
		must(t, s.claim(t.Context(), b))
		around = s.look(t, b)
		expect(t, "second after the takeover: shards, members", []int{64, 1}, []int{len(around.held), around.members})
		expect(t, "second after the takeover: unclean shards", 32, len(around.unclean))
		must(t, s.leave(t.Context(), b))
		c := s.owner(t)
		around = s.look(t, c)
		expect(t, "third after a proper leave: shards, unclean", []int{64, 0}, []int{len(around.held), len(around.unclean)})
	})
}

func TestStoreTellsOpenWriters(t *testing.T) {
	eachStore(t, func(t *testing.T, s contractStore) {
		s.put(t, "k", "1")
		before, err := s.link.position(t.Context())
		must(t, err)
		end := s.enqueue(t, false, Message{Topic: "t", Key: "k"}, Message{Topic: "t", Key: "k"})
		position, err := s.link.position(t.Context())
		must(t, err)
		writers, err := s.link.writers(t.Context())
		must(t, err)
		expect(t, "positions drawn and writers open", []int64{2, 1}, []int64{position - before, int64(len(writers))})
		expect(t, "visible", []string{"1"}, texts(s.poll(t, 10, 1<<20, 0)))
		end()
		writers, err = s.link.writers(t.Context())
		must(t, err)
		expect(t, "writers after the end", 0, len(writers))
		expect(t, "visible after an abort", []string{"1"}, texts(s.poll(t, 10, 1<<20, 0)))
	})
}

func TestStorePollsPrefixes(t *testing.T) {
	eachStore(t, func(t *testing.T, s contractStore) {
		s.put(t, "a", "a1", "a2", "a3", "a4")
		s.put(t, "b", "b1", "b2", "b3", "b4")
		all := s.poll(t, 10, 1<<20, 0)
		expect(t, "all", 8, len(all))
		ordered := slices.IsSortedFunc(all, func(x, y row) int { return cmp.Or(cmp.Compare(x.shard, y.shard), cmp.Compare(x.id, y.id)) })
		expect(t, "in order", true, ordered)
		expect(t, "two of each", []string{"a1", "a2", "b1", "b2"}, slices.Sorted(slices.Values(texts(s.poll(t, 2, 1<<20, 0)))))
		expect(t, "5 bytes: the third row crosses the bound", []string{"a1", "a2", "b1"}, byPrefix(texts(s.poll(t, 10, 5, 0))))
		expect(t, "1 byte: one row still comes", 1, len(s.poll(t, 10, 1, 0)))
		highest := slices.MaxFunc(all, func(x, y row) int { return cmp.Compare(x.id, y.id) })
		expect(t, "above the last", 0, len(s.poll(t, 10, 1<<20, highest.id)))
		expect(t, "above the last but one", []string{"b4"}, texts(s.poll(t, 10, 1<<20, highest.id-1)))
	})
}

// byPrefix makes the answer comparable whichever of the two shards comes first.
func byPrefix(list []string) []string {
	slices.Sort(list)
	if len(list) == 3 && list[1][0] == 'b' {
		return []string{"a1", "a2", "b1"}
	}
	return list
}

func TestStoreFencesChanges(t *testing.T) {
	eachStore(t, func(t *testing.T, s contractStore) {
		owner := s.owner(t)
		epochs := epochsOf(s.look(t, owner))
		s.put(t, "a", "a1")
		s.put(t, "b", "b1")
		rows := s.poll(t, 10, 1<<20, 0)
		var c change
		for i := range rows {
			c.block = append(c.block, blocked{rows[i].keyRef(), 0})
			c.deferred = append(c.deferred, failure{ref: rows[i].ref, attempts: 1, text: "x"})
		}
		lost := rows[0].shard
		epochs[lost]++
		done, err := s.link.apply(t.Context(), owner, epochs, c)
		must(t, err)
		expect(t, "lost", []int16{lost}, done.lost)
		expect(t, "still in hot", texts(rows[:1]), texts(s.poll(t, 10, 1<<20, 0)))
		expect(t, "deferred", texts(rows[1:]), s.due(t))
		done, err = s.link.apply(t.Context(), uuid.New(), epochsOf(s.look(t, owner)), c)
		must(t, err)
		expect(t, "lost by a stranger", 2, len(done.lost))
	})
}

func TestStoreKeepsBlockedKeys(t *testing.T) {
	eachStore(t, func(t *testing.T, s contractStore) {
		owner := s.owner(t)
		apply := func(c change) outcome {
			t.Helper()
			done, err := s.link.apply(t.Context(), owner, epochsOf(s.look(t, owner)), c)
			must(t, err)
			return done
		}
		s.put(t, "a", "a1", "a2", "a3")
		s.put(t, "", "loose")
		rows := map[string]row{}
		for _, r := range s.poll(t, 10, 1<<20, 0) {
			rows[string(r.Payload)] = r
		}
		a1, a2, a3, loose := rows["a1"], rows["a2"], rows["a3"], rows["loose"]
		key := a1.keyRef()
		apply(change{
			block:    []blocked{{key, time.Hour}},
			deferred: []failure{{ref: a1.ref, attempts: 1, text: "refused", delay: time.Hour}, {ref: loose.ref, attempts: 1, text: "refused", delay: time.Hour}},
		})
		behind := []found{{a2.ref, a2.ID, a2.place}}
		settle := func(epoch int64, confirmed, followers []found) []int16 {
			t.Helper()
			lost, err := s.link.settle(t.Context(), owner, map[int16]int64{key.shard: epoch}, confirmed, false, followers)
			must(t, err)
			return lost
		}
		s.put(t, "", "sent", "sent and moved")
		sent := map[string]found{}
		for _, r := range s.poll(t, 10, 1<<20, 0) {
			sent[string(r.Payload)] = found{r.ref, r.ID, r.place}
		}
		elsewhere := sent["sent and moved"]
		elsewhere.place = sent["sent"].place
		expect(t, "lost, of another epoch", []int16{key.shard}, settle(1<<40, []found{sent["sent"], elsewhere}, behind))
		expect(t, "hot, before what comes behind is moved", []string{"a2", "a3"}, texts(s.poll(t, 10, 1<<20, 0)))
		epoch := epochsOf(s.look(t, owner))[key.shard]
		expect(t, "lost", 0, len(settle(epoch, nil, behind)))
		expect(t, "hot", []string{"a3"}, texts(s.poll(t, 10, 1<<20, 0)))
		expect(t, "due", []string{}, s.due(t))
		in, some, err := s.link.nextDue(t.Context(), allShards())
		must(t, err)
		if !some || in < 59*time.Minute || in > time.Hour {
			t.Errorf("next due in %v, %v", in, some)
		}
		keys, err := s.link.blocked(t.Context(), []int16{key.shard})
		must(t, err)
		expect(t, "blocked", []keyRef{key}, keys)

		apply(change{block: []blocked{{key, 0}}})
		expect(t, "lost", 0, len(settle(epoch, nil, []found{{a3.ref, a3.ID, a3.place}})))
		time.Sleep(2 * time.Millisecond)
		expect(t, "due once it is time", []string{"a1", "a2", "a3"}, s.due(t))
		due, err := s.link.due(t.Context(), allShards(), 100, 2, 1<<20)
		must(t, err)
		expect(t, "two of a key", []string{"a1", "a2"}, texts(due))
		expect(t, "attempts", []int{2, 1}, []int{due[0].Attempt, due[1].Attempt})
		expect(t, "freed while messages are left", 0, len(apply(change{unblock: []keyRef{key}}).free))

		apply(change{failed: []failure{{ref: due[0].ref, attempts: 2, text: errRelayDied.Error()}}})
		read, err := s.link.read(t.Context(), []ref{a1.origin(), loose.origin()})
		must(t, err)
		expect(t, "read", []string{"a1", "loose"}, slices.Sorted(slices.Values(texts(read))))
		due, err = s.link.due(t.Context(), allShards(), 100, 1, 1<<20)
		must(t, err)
		expect(t, "attempts after a further failure", 3, due[0].Attempt)
		expect(t, "deadly", true, due[0].deadly)

		apply(change{buried: []failure{{ref: due[0].ref, text: "gave up"}}})
		must(t, s.link.confirm(t.Context(), []found{{ref{a2.shard, a2.id, true}, a2.ID, a2.place}, {a3.ref, a3.ID, a3.place}, {loose.ref, loose.ID, loose.place}, {a1.ref, a1.ID, a1.place}}, false))
		drained, err := s.link.drained(t.Context(), allShards(), 10)
		must(t, err)
		expect(t, "drained", []keyRef{key}, drained)
		expect(t, "freed", []keyRef{key}, apply(change{unblock: []keyRef{key}}).free)
		_, some, err = s.link.nextDue(t.Context(), allShards())
		must(t, err)
		expect(t, "something due", false, some)
	})
}

func TestStoreHoldsKeysAndNotesProbes(t *testing.T) {
	eachStore(t, func(t *testing.T, s contractStore) {
		s.setHold(t)
		owner := s.owner(t)
		around := s.look(t, owner)
		expect(t, "policy", true, around.hold)
		s.put(t, "a", "a1", "a2")
		rows := s.poll(t, 10, 1<<20, 0)
		c := change{
			hold: []held{{rows[0].keyRef(), rows[0].id}}, buried: []failure{{ref: rows[0].ref, text: "bad"}}, deferred: []failure{{ref: rows[1].ref}},
			probes: []probe{{rows[0].shard, rows[0].id, true}},
		}
		_, err := s.link.apply(t.Context(), owner, epochsOf(around), c)
		must(t, err)
		expect(t, "due behind a dead message", []string{}, s.due(t))
		_, some, err := s.link.nextDue(t.Context(), allShards())
		must(t, err)
		expect(t, "a held key is due", false, some)
		expect(t, "notes of a shard that is not on probation", 0, len(s.look(t, owner).unclean))

		time.Sleep(contractLease + 100*time.Millisecond)
		next := s.owner(t)
		around = s.look(t, next)
		expect(t, "unclean", 64, len(around.unclean))
		expect(t, "note", probe{rows[0].shard, rows[0].id, true}, around.unclean[rows[0].shard])
		_, err = s.link.apply(t.Context(), next, epochsOf(around), change{clean: allShards()})
		must(t, err)
		expect(t, "unclean after the probation", 0, len(s.look(t, next).unclean))
	})
}
