package outbox

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
)

// memory is a store in memory, for the simulation. It passes the same contract as the one in PostgreSQL.
type memory struct {
	lease time.Duration
	hold  bool
	start time.Time

	mu       sync.Mutex
	seq      int64
	epoch    int64
	relays   map[uuid.UUID]*memoryRelay
	shards   [shards]memoryShard
	hot      map[ref]*memoryMessage // refs with deferred false
	deferred map[ref]*memoryMessage // refs with deferred false too
	dead     map[ref]*memoryMessage
	keys     map[keyRef]*memoryBlock
	open     map[*memoryTx]bool

	keep      bool
	sent      []*memoryMessage
	scheduled []*memoryMessage
}

type memoryRelay struct{ joined, until time.Time }

type memoryShard struct {
	owner   uuid.UUID
	epoch   int64
	unclean bool
	note    probe
}

type memoryMessage struct {
	Record
	shard    int16
	attempts int
	text     string
	due      time.Time // of a message without a key
}

type memoryBlock struct {
	due    time.Time
	reason string
	dead   int64 // the message that holds the key
}

// memoryTx is an open business transaction.
type memoryTx struct {
	store *memory
	rows  []*memoryMessage
}

func newMemory(lease time.Duration) *memory {
	return &memory{
		lease: lease, start: time.Now(), relays: map[uuid.UUID]*memoryRelay{}, hot: map[ref]*memoryMessage{}, deferred: map[ref]*memoryMessage{},
		dead: map[ref]*memoryMessage{}, keys: map[keyRef]*memoryBlock{}, open: map[*memoryTx]bool{},
	}
}

// shardOf stands for the generated column: any function of the key, or of the id.
func shardOf(m *Message) int16 {
	h := uint32(2166136261)
	of := []byte(m.Key)
	if m.Key == "" {
		of = m.ID[:]
	}
	for _, b := range of {
		h = (h ^ uint32(b)) * 16777619
	}
	return int16(h % shards)
}

func (s *memory) begin() *memoryTx {
	return &memoryTx{store: s}
}

func (x *memoryTx) enqueue(m Message) int64 {
	s := x.store
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open[x] = true
	s.seq++
	x.rows = append(x.rows, &memoryMessage{Record: Record{Message: m, Position: s.seq, EnqueuedAt: time.Now()}, shard: shardOf(&m)})
	return s.seq
}

func (x *memoryTx) end(commit bool) {
	s := x.store
	s.mu.Lock()
	defer s.mu.Unlock()
	if commit {
		for _, r := range x.rows {
			s.hot[ref{shard: r.shard, id: r.Position}] = r
		}
	}
	delete(s.open, x)
}

func (s *memory) join(_ context.Context, owner uuid.UUID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.relays[owner] == nil {
		now := time.Now()
		s.relays[owner] = &memoryRelay{now, now.Add(s.lease)}
	}
	return nil
}

func (s *memory) members() []uuid.UUID {
	return slices.SortedFunc(maps.Keys(s.relays), func(a, b uuid.UUID) int {
		return cmp.Or(s.relays[a].joined.Compare(s.relays[b].joined), cmp.Compare(a.String(), b.String()))
	})
}

func (s *memory) free(i int) bool { return s.relays[s.shards[i].owner] == nil }

func (s *memory) claim(_ context.Context, owner uuid.UUID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, r := range s.relays {
		if r.until.Before(time.Now()) {
			delete(s.relays, id)
		}
	}
	members := s.members()
	rank := slices.Index(members, owner)
	if rank < 0 {
		return nil
	}
	want := fairShare(len(members), rank)
	for i := range s.shards {
		if s.shards[i].owner == owner {
			want--
		}
	}
	for i := range s.shards {
		if want > 0 && s.free(i) {
			s.epoch++
			s.shards[i].unclean = s.shards[i].owner != uuid.Nil
			s.shards[i].owner, s.shards[i].epoch = owner, s.epoch
			want--
		}
	}
	return nil
}

func (s *memory) release(_ context.Context, owner uuid.UUID, given []holding) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, h := range given {
		if at := &s.shards[h.shard]; at.owner == owner && at.epoch == h.epoch {
			at.owner, at.unclean = uuid.Nil, false
		}
	}
	return nil
}

func (s *memory) renew(_ context.Context, owner uuid.UUID) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.relays[owner]
	if r == nil || !r.until.After(time.Now()) {
		return false, nil
	}
	r.until = time.Now().Add(s.lease)
	return true, nil
}

func (s *memory) leave(_ context.Context, owner uuid.UUID) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range s.shards {
		if s.shards[i].owner == owner {
			s.shards[i].owner, s.shards[i].unclean = uuid.Nil, false
		}
	}
	delete(s.relays, owner)
	return nil
}

func (s *memory) connect(context.Context) (link, error) { return s, nil }

func (s *memory) close() {}

func (s *memory) position(context.Context) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seq, nil
}

func (s *memory) writers(context.Context) ([]writer, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []writer
	for x := range s.open {
		list = append(list, writer{id: x.rows[0].ID.String()})
	}
	return list, nil
}

func (s *memory) serverStart(context.Context) (time.Time, error) { return s.start, nil }

func (s *memory) look(_ context.Context, owner uuid.UUID) (surroundings, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	around := surroundings{unclean: map[int16]probe{}, members: len(s.relays), rank: max(0, slices.Index(s.members(), owner)), hold: s.hold, keep: s.keep}
	for _, r := range s.relays {
		around.expired = around.expired || r.until.Before(time.Now())
	}
	for i, at := range s.shards {
		if s.free(i) {
			around.free++
		}
		if at.owner == owner {
			around.held = append(around.held, holding{int16(i), at.epoch})
			if at.unclean {
				around.unclean[int16(i)] = probe{int16(i), at.note.id, at.note.alone}
			}
		}
	}
	return around, nil
}

// sorted lists the messages of a table that match, by shard and position.
func sorted(table map[ref]*memoryMessage, deferred bool, match func(*memoryMessage) bool) []row {
	var rows []row
	for at, m := range table {
		if match(m) {
			r := row{Record: m.Record, ref: ref{at.shard, at.id, deferred}, deadly: m.text == errRelayDied.Error()}
			r.Attempt = m.attempts + 1
			rows = append(rows, r)
		}
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Or(cmp.Compare(a.shard, b.shard), cmp.Compare(a.id, b.id)) })
	return rows
}

func (s *memory) poll(_ context.Context, from []cursor, bytes int64) ([]row, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	type ranked struct {
		row
		n int
	}
	var found []ranked
	for _, c := range from {
		rows := sorted(s.hot, false, func(m *memoryMessage) bool { return m.shard == c.shard && m.Position > c.floor })
		for n, r := range rows[:min(len(rows), int(c.limit))] {
			found = append(found, ranked{r, n})
		}
	}
	slices.SortFunc(found, func(a, b ranked) int { return cmp.Or(cmp.Compare(a.n, b.n), cmp.Compare(a.shard, b.shard)) })
	var rows []row
	var before int64
	for _, f := range found {
		if before >= bytes {
			break
		}
		rows, before = append(rows, f.row), before+int64(len(f.Payload))
	}
	slices.SortFunc(rows, func(a, b row) int { return cmp.Or(cmp.Compare(a.shard, b.shard), cmp.Compare(a.id, b.id)) })
	return rows, nil
}

func (s *memory) blocked(_ context.Context, of []int16) ([]keyRef, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var keys []keyRef
	for k := range s.keys {
		if slices.Contains(of, k.shard) {
			keys = append(keys, k)
		}
	}
	return keys, nil
}

func (s *memory) due(_ context.Context, of []int16, keys, perKey int, _ int64) ([]row, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var rows []row
	for _, k := range s.dueKeys(of) {
		if keys > 0 {
			keys--
			behind := sorted(s.deferred, true, func(m *memoryMessage) bool { return m.shard == k.shard && m.Key == k.key })
			rows = append(rows, behind[:min(len(behind), perKey)]...)
		}
	}
	return append(rows, sorted(s.deferred, true, func(m *memoryMessage) bool {
		return m.Key == "" && slices.Contains(of, m.shard) && !m.due.After(time.Now())
	})...), nil
}

func (s *memory) read(_ context.Context, at []ref) ([]row, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	wanted := func(m *memoryMessage) bool { return slices.Contains(at, ref{shard: m.shard, id: m.Position}) }
	return append(sorted(s.hot, false, wanted), sorted(s.deferred, true, wanted)...), nil
}

func (s *memory) behind(k keyRef) int {
	return len(sorted(s.deferred, true, func(m *memoryMessage) bool { return m.shard == k.shard && m.Key == k.key }))
}

func (s *memory) drained(_ context.Context, of []int16, _ int) ([]keyRef, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(s.dueKeys(of), func(k keyRef) bool { return s.behind(k) > 0 }), nil
}

// dueKeys lists the blocked keys of shards whose time has come, oldest first.
func (s *memory) dueKeys(of []int16) []keyRef {
	var keys []keyRef
	for k, b := range s.keys {
		if slices.Contains(of, k.shard) && b.reason == "retry" && !b.due.After(time.Now()) {
			keys = append(keys, k)
		}
	}
	slices.SortFunc(keys, func(a, b keyRef) int {
		return cmp.Or(s.keys[a].due.Compare(s.keys[b].due), cmp.Compare(a.shard, b.shard), cmp.Compare(a.key, b.key))
	})
	return keys
}

func (s *memory) nextDue(_ context.Context, of []int16) (time.Duration, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	first := never
	for k, b := range s.keys {
		if slices.Contains(of, k.shard) && b.reason == "retry" && b.due.Before(first) {
			first = b.due
		}
	}
	for _, m := range s.deferred {
		if m.Key == "" && slices.Contains(of, m.shard) && m.due.Before(first) {
			first = m.due
		}
	}
	return time.Until(first), first != never, nil
}

func (s *memory) confirm(_ context.Context, confirmed []found, keep bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(confirmed, keep)
	return nil
}

func (s *memory) settle(_ context.Context, owner uuid.UUID, epochs map[int16]int64, confirmed []found, keep bool, followers []found) (lost []int16, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(confirmed, keep)
	var c change
	for _, f := range followers {
		if m := s.hot[f.origin()]; m == nil || m.ID == f.message {
			c.deferred = append(c.deferred, failure{ref: f.ref})
		}
	}
	done, err := s.change(owner, epochs, c)
	return done.lost, err
}

func (s *memory) remove(confirmed []found, keep bool) {
	for _, r := range confirmed {
		at := r.origin()
		for _, from := range []map[ref]*memoryMessage{s.hot, s.deferred, s.dead} {
			m := from[at]
			if m == nil || m.ID != r.message {
				continue
			}
			if keep {
				s.sent = append(s.sent, m)
			}
			delete(from, at)
		}
	}
}

func (s *memory) sentDays(context.Context) error { return nil }

func (s *memory) moveScheduled(_ context.Context, atMost int) (int, time.Duration, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortStableFunc(s.scheduled, func(a, b *memoryMessage) int { return a.due.Compare(b.due) })
	moved := 0
	for moved < min(atMost, len(s.scheduled)) && !s.scheduled[moved].due.After(time.Now()) {
		s.place(s.scheduled[moved])
		moved++
	}
	s.scheduled = s.scheduled[moved:]
	if len(s.scheduled) == 0 {
		return moved, time.Hour, nil
	}
	return moved, time.Until(s.scheduled[0].due), nil
}

// place puts a message at the end of hot.
func (s *memory) place(m *memoryMessage) {
	s.seq++
	m.Position = s.seq
	s.hot[ref{shard: m.shard, id: m.Position}] = m
}

var errBroken = errors.New("the store's rules do not allow it")

func (s *memory) apply(_ context.Context, owner uuid.UUID, epochs map[int16]int64, c change) (outcome, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.change(owner, epochs, c)
}

func (s *memory) change(owner uuid.UUID, epochs map[int16]int64, c change) (outcome, error) {
	var done outcome
	for _, i := range c.shards() {
		if at := s.shards[i]; at.owner != owner || at.epoch != epochs[i] {
			done.lost = append(done.lost, i)
		}
	}
	c = c.without(done.lost)
	for _, b := range c.block {
		if known := s.keys[b.keyRef]; known == nil {
			s.keys[b.keyRef] = &memoryBlock{due: time.Now().Add(b.delay), reason: "retry"}
		} else if known.reason == "retry" {
			known.due = time.Now().Add(b.delay)
		}
	}
	for _, h := range c.hold {
		if b := s.keys[h.keyRef]; b == nil || b.reason != "dead" {
			s.keys[h.keyRef] = &memoryBlock{never, "dead", h.id}
		}
	}
	for _, f := range c.deferred {
		at := f.origin()
		m := s.hot[at]
		if m == nil {
			continue
		}
		if m.Key != "" && s.keys[keyRef{m.shard, m.Key}] == nil {
			return outcome{}, errBroken
		}
		delete(s.hot, at)
		m.attempts, m.text, m.due = f.attempts, f.text, time.Now().Add(f.delay)
		s.deferred[at] = m
	}
	for _, f := range c.failed {
		at := f.origin()
		if m := s.deferred[at]; m != nil {
			m.due = time.Now().Add(f.delay)
			if f.attempts > 0 {
				m.attempts, m.text = m.attempts+1, f.text
			}
		}
	}
	for _, f := range c.buried {
		at := f.origin()
		for _, from := range []map[ref]*memoryMessage{s.hot, s.deferred} {
			if m := from[at]; m != nil {
				delete(from, at)
				m.attempts, m.text = m.attempts+1, f.text
				s.dead[at] = m
			}
		}
	}
	for _, p := range c.probes {
		s.shards[p.shard].note = p
	}
	for _, i := range c.clean {
		s.shards[i].unclean, s.shards[i].note = false, probe{}
	}
	for _, k := range c.unblock {
		if b := s.keys[k]; b != nil && b.reason == "retry" && s.behind(k) == 0 {
			delete(s.keys, k)
			done.free = append(done.free, k)
		}
	}
	return done, nil
}

// requeue is commitbox.outbox_requeue.
func (s *memory) requeue(at ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.dead[at]
	if m == nil {
		return
	}
	delete(s.dead, at)
	m.attempts = 0
	k := keyRef{m.shard, m.Key}
	if b := s.keys[k]; m.Key != "" && b != nil && b.dead == m.Position {
		s.deferred[at] = m
		*b = memoryBlock{due: time.Now(), reason: "retry"}
		s.epoch++
		s.shards[m.shard].epoch = s.epoch
		return
	}
	s.place(m)
}

// The operator's functions, as in migrations/00004_outbox_operate.sql.

func (s *memory) touch(k keyRef) {
	s.epoch++
	s.shards[k.shard].epoch = s.epoch
}

// reblock changes why a key is blocked, and says whether it did.
func (s *memory) reblock(k keyRef, from, to string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.touch(k)
	b := s.keys[k]
	if b == nil || b.reason != from {
		return false
	}
	b.reason, b.due = to, never
	if to == "retry" {
		b.due = time.Now()
	}
	return true
}

func (s *memory) park(k keyRef) bool {
	s.mu.Lock()
	known := s.keys[k] != nil
	if !known {
		s.touch(k)
		s.keys[k] = &memoryBlock{due: never, reason: "parked"}
	}
	s.mu.Unlock()
	return !known || s.reblock(k, "retry", "parked")
}

// skipHead takes the first message of a blocked key out of its way and returns it.
func (s *memory) skipHead(k keyRef) (head uuid.UUID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.touch(k)
	b := s.keys[k]
	if b == nil {
		return head
	}
	of := func(m *memoryMessage) bool { return m.shard == k.shard && m.Key == k.key }
	if b.reason == "dead" {
		head = s.dead[ref{shard: k.shard, id: b.dead}].ID
	} else if behind := sorted(s.deferred, false, of); len(behind) > 0 {
		at := behind[0].ref
		head = behind[0].ID
		s.dead[at] = s.deferred[at]
		delete(s.deferred, at)
	}
	if head != uuid.Nil && b.reason != "parked" {
		*b = memoryBlock{due: time.Now(), reason: "retry"}
	}
	return head
}

// discard gives a dead message up. Here it is forgotten; in PostgreSQL it stays.
func (s *memory) discard(at ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.dead[at]
	delete(s.dead, at)
	k := keyRef{m.shard, m.Key}
	if b := s.keys[k]; b != nil && b.dead == m.Position {
		*b = memoryBlock{due: time.Now(), reason: "retry"}
		s.touch(k)
	}
}

// replay publishes a kept message again.
func (s *memory) replay(m *memoryMessage) {
	s.mu.Lock()
	defer s.mu.Unlock()
	again := *m
	again.attempts, again.text = 0, ""
	s.place(&again)
}

// schedule stores a committed message for later.
func (s *memory) schedule(m Message, due time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.scheduled = append(s.scheduled, &memoryMessage{Record: Record{Message: m, EnqueuedAt: time.Now()}, shard: shardOf(&m), due: due})
}
