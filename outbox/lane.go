package outbox

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
)

const (
	sweepEvery  = 10 * time.Second // one shard; stretched to 100 times what the read took
	dueKeys     = 64               // blocked keys served per round
	duePerKey   = 16               // messages of each
	settleLimit = 5 * time.Second  // bound of the database's work on what was published
)

// lane is a sequential loop over some of the relay's shards: read, publish, settle, read again. It has a connection of
// its own and holds no transaction while it publishes. Everything it knows can be read from the database again, but for
// the messages that are confirmed and not yet deleted.
type lane struct {
	cfg        RelayConfig
	policy     policy
	publisher  Publisher
	keepsOrder bool // the publisher is a KeyOrderer
	store      store
	owner      uuid.UUID
	lease      *lease
	gate       *gate
	roster     *roster
	breaker    *breaker
	index      int

	link        link
	shards      []*shard // in order
	version     uint64   // of the assignment that shards come from
	keep        bool     // what is confirmed is kept
	unconfirmed []found  // by the broker; their delete is not acknowledged
	published   int      // confirmed since the lane was made

	seen       view
	more       bool      // the last read found something, or a key was freed: look again
	rested     time.Time // no round before
	nextDue    time.Time // zero: not known; see never
	nextSweep  time.Time
	free       []row // memory of followers
	sweepShard int

	round      round
	suspects   map[ref]int     // messages that found the destination away, and in how many rounds others got through since
	peek       map[int16]int64 // while the destination is away: from where to read, past those that found it away
	passed     map[string]bool // keys of messages below peek, of which nothing may be sent
	awayTopics map[string]bool // topics of which a message found the destination away, and none got through since
	probation  map[int16]int   // shards taken over from a relay that died, and how many messages are still to be noted
	accused    map[ref]bool    // messages to be tried alone
	examined   map[int16]bool  // shards whose former owner's last message was looked at, for as long as they are held
}

// shard is what a lane knows of one shard.
type shard struct {
	holding
	floor   int64
	limit   int32
	blocked map[string]bool
}

var never = time.Unix(1<<40, 0)

// step does one round: what is due, then what is new. worked says that another round may follow at once.
func (l *lane) step(ctx context.Context) (worked bool, err error) {
	defer func() {
		if err != nil {
			l.forget()
		}
	}()
	if err := l.prepare(ctx); err != nil {
		return false, err
	}
	now := time.Now()
	if now.Before(l.rested) || len(l.shards) == 0 {
		return false, nil
	}
	ok, trial, wait := l.breaker.admit(now)
	if !ok {
		l.rested = now.Add(wait)
		return false, nil
	}
	l.round = round{trial: trial}
	defer l.conclude()
	serve := []func(context.Context) (bool, error){l.serveDue, l.serveHot}
	if trial { // what fails already is the worst of witnesses
		slices.Reverse(serve)
	}
	for _, serve := range serve {
		did, err := serve(ctx)
		worked = worked || did
		if err != nil || ctx.Err() != nil || trial && l.round.away != nil {
			return worked, err
		}
	}
	return worked, nil
}

// prepare brings the lane to a state from which it may read: connected, leftovers settled, ownership known.
func (l *lane) prepare(ctx context.Context) (err error) {
	if l.link == nil {
		if l.link, err = l.store.connect(ctx); err != nil {
			return err
		}
	}
	if err := l.confirm(ctx, nil); err != nil {
		return err
	}
	if next, _ := l.roster.assigned(); next.version != l.version {
		return l.adopt(ctx, next)
	}
	return nil
}

// adopt takes up an assignment. A shard that the lane did not serve under the same epoch before is read anew: somebody
// else worked on it. A shard that is not assigned any more is out of the lane's hands when adopt returns.
func (l *lane) adopt(ctx context.Context, next assignment) error {
	known := make(map[holding]*shard, len(l.shards))
	for _, s := range l.shards {
		known[s.holding] = s
	}
	l.shards, l.version, l.policy.hold, l.keep = nil, next.version, next.hold, next.keep
	var fresh []*shard
	for _, h := range next.held {
		if int(h.shard)%l.cfg.Lanes != l.index {
			continue
		}
		s := known[h]
		if s == nil {
			s = &shard{holding: h, limit: int32(max(1, l.cfg.Batch*l.cfg.Lanes/shards)), blocked: make(map[string]bool)}
			fresh = append(fresh, s)
		}
		l.shards = append(l.shards, s)
	}
	maps.DeleteFunc(l.examined, func(id int16, _ bool) bool { return l.find(id) == nil })
	if len(fresh) > 0 {
		l.more, l.nextDue = true, time.Time{}
		if err := l.loadBlocked(ctx, fresh); err != nil {
			return err
		}
		if err := l.examine(ctx, fresh, next.unclean); err != nil {
			return err
		}
	}
	l.roster.adopt(l.index, next.version)
	return nil
}

func (l *lane) loadBlocked(ctx context.Context, fresh []*shard) error {
	ids := make([]int16, len(fresh))
	for i, s := range fresh {
		ids[i] = s.shard
	}
	keys, err := l.link.blocked(ctx, ids)
	if err != nil {
		return err
	}
	for _, k := range keys {
		if s := l.find(k.shard); s != nil {
			s.blocked[k.key] = true
		}
	}
	return nil
}

func (l *lane) find(id int16) *shard {
	i, ok := slices.BinarySearchFunc(l.shards, id, func(s *shard, id int16) int { return int(s.shard) - int(id) })
	if !ok {
		return nil
	}
	return l.shards[i]
}

func (l *lane) shardIDs() []int16 {
	ids := make([]int16, len(l.shards))
	for i, s := range l.shards {
		ids[i] = s.shard
	}
	return ids
}

// forget drops everything that was learned over a connection that failed.
func (l *lane) forget() {
	if l.link != nil {
		l.link.close()
		l.link = nil
	}
	l.shards, l.version, l.nextDue, l.seen, l.more = nil, 0, time.Time{}, view{}, true
}

// serveDue publishes what was deferred until now, straight from there, and frees the keys behind which nothing is left.
func (l *lane) serveDue(ctx context.Context) (worked bool, err error) {
	if time.Now().Before(l.nextDue) {
		return false, nil
	}
	rows, err := l.link.due(ctx, l.shardIDs(), min(dueKeys, l.cfg.Batch), max(1, min(duePerKey, l.cfg.Batch/dueKeys)), l.cfg.BatchBytes)
	if err != nil {
		return false, err
	}
	if len(rows) > 0 {
		if _, err := l.publishAndSettle(ctx, rows, nil); err != nil {
			return false, err
		}
	}
	if err := l.freeDrained(ctx); err != nil {
		return false, err
	}
	in, some, err := l.link.nextDue(ctx, l.shardIDs())
	if err != nil {
		return false, err
	}
	l.nextDue = never
	if some {
		l.nextDue = time.Now().Add(in)
	}
	return len(rows) > 0, nil
}

func (l *lane) freeDrained(ctx context.Context) error {
	keys, err := l.link.drained(ctx, l.shardIDs(), dueKeys)
	if err != nil || len(keys) == 0 {
		return err
	}
	return l.apply(ctx, change{unblock: keys})
}

// serveHot reads what is new, moves the messages of blocked keys aside and publishes the others.
func (l *lane) serveHot(ctx context.Context) (worked bool, err error) {
	if len(l.shards) == 0 { // the last one was lost in this round
		return false, nil
	}
	now, _ := l.gate.view()
	if now.generation != l.seen.generation {
		l.resetFloors()
	}
	sweeping := l.sweep()
	if now.pulse == l.seen.pulse && !l.more && !sweeping {
		return false, nil
	}
	l.seen, l.more = now, false
	if len(l.peek) > 0 {
		if sent, err := l.peekOn(ctx, now.resolved); sent || err != nil {
			return sent, err
		}
	}
	started := time.Now()
	rows, err := l.link.poll(ctx, l.cursors(), l.cfg.BatchBytes)
	if err != nil {
		return false, err
	}
	defer func() { // the next read may be far away
		clear(rows)
		clear(l.free)
	}()
	if sweeping {
		l.nextSweep = started.Add(max(sweepEvery, 100*time.Since(started)))
	}
	l.more = len(rows) > 0
	free, followers := l.followers(rows)
	left, err := l.publishAndSettle(ctx, free, followers)
	if err != nil {
		return false, err
	}
	if err := l.discharge(ctx, rows, left); err != nil {
		return false, err
	}
	l.advanceFloors(now.resolved, rows, left)
	l.lookPast(now.resolved, rows)
	return len(rows) > 0, nil
}

func (l *lane) cursors() []cursor {
	from := make([]cursor, len(l.shards))
	for i, s := range l.shards {
		from[i] = cursor{s.shard, max(s.floor, l.peek[s.shard]), s.limit}
	}
	return from
}

func (l *lane) resetFloors() {
	for _, s := range l.shards {
		s.floor = 0
	}
	l.more = true
}

// sweep makes one shard be read from the bottom now and then. Floors are exact; this is for what nobody thought of.
func (l *lane) sweep() bool {
	if time.Now().Before(l.nextSweep) {
		return false
	}
	l.nextSweep = time.Now().Add(sweepEvery)
	l.sweepShard = (l.sweepShard + 1) % len(l.shards)
	l.shards[l.sweepShard].floor = 0
	return true
}

// followers splits rows into those that may be published and the messages of blocked keys, which are to move behind their heads.
func (l *lane) followers(rows []row) (free []row, behind []found) {
	l.free = l.free[:0]
	if !slices.ContainsFunc(l.shards, func(s *shard) bool { return len(s.blocked) > 0 }) {
		return rows, nil
	}
	for i := range rows {
		r := &rows[i]
		if s := l.find(r.shard); r.Key != "" && s != nil && s.blocked[r.Key] {
			behind = append(behind, found{r.ref, r.ID, r.place})
		} else {
			l.free = append(l.free, *r)
		}
	}
	return l.free, behind
}

// publishAndSettle publishes rows, deletes what was confirmed, records what failed and moves followers behind their heads. It
// returns the rows that stay.
func (l *lane) publishAndSettle(ctx context.Context, rows []row, followers []found) (left []row, err error) {
	if len(rows) == 0 {
		return nil, l.confirm(ctx, followers)
	}
	sent, err := l.deliver(ctx, rows)
	if err != nil {
		return nil, err
	}
	d := l.policy.decide(rows, sent.verdicts)
	l.round.confirmed = l.round.confirmed || len(d.confirmed) > 0
	l.unconfirmed = append(d.confirmed, l.unconfirmed...)
	l.published += len(d.confirmed)
	if err := l.confirm(ctx, followers); err != nil {
		return nil, err
	}
	l.logFailures(rows, sent.verdicts, d)
	l.strike(&d.change, rows, sent.verdicts)
	if err := l.apply(ctx, d.change); err != nil {
		return nil, err
	}
	if !d.tried {
		l.rested = time.Now().Add(l.cfg.PollMax) // the lease is about to end, or the publisher tries nothing
	}
	for _, i := range d.left {
		left = append(left, rows[i])
	}
	return left, nil
}

// confirm deletes what the broker has confirmed, and moves followers in the same transaction. Until it is acknowledged nothing
// else is done, so that nothing confirmed is read and published again.
func (l *lane) confirm(ctx context.Context, followers []found) (err error) {
	if len(l.unconfirmed)+len(followers) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleLimit)
	defer cancel()
	var lost []int16
	if len(followers) > 0 {
		lost, err = l.link.settle(ctx, l.owner, l.epochs(), l.unconfirmed, l.keep, followers)
	} else {
		err = l.link.confirm(ctx, l.unconfirmed, l.keep)
	}
	if err != nil {
		return fmt.Errorf("delete %d confirmed messages, defer %d: %w", len(l.unconfirmed), len(followers), err)
	}
	l.unconfirmed = nil
	l.lose(lost)
	return nil
}

func (l *lane) epochs() map[int16]int64 {
	epochs := make(map[int16]int64, len(l.shards))
	for _, s := range l.shards {
		epochs[s.shard] = s.epoch
	}
	return epochs
}

// lose drops shards that somebody else owns now.
func (l *lane) lose(lost []int16) {
	if len(lost) > 0 {
		l.shards = slices.DeleteFunc(l.shards, func(s *shard) bool { return slices.Contains(lost, s.shard) })
		l.roster.poke()
	}
}

// apply makes a change of state and keeps the lane's memory in step with it.
func (l *lane) apply(ctx context.Context, c change) error {
	if c.empty() {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleLimit)
	defer cancel()
	done, err := l.link.apply(ctx, l.owner, l.epochs(), c)
	if err != nil {
		return fmt.Errorf("record failures: %w", err)
	}
	for _, b := range c.block {
		l.block(b.keyRef, b.delay)
	}
	for _, h := range c.hold {
		l.block(h.keyRef, time.Hour)
	}
	for _, f := range slices.Concat(c.deferred, c.failed) {
		if f.text != "" {
			l.dueIn(f.delay)
		}
	}
	for _, k := range done.free {
		if s := l.find(k.shard); s != nil {
			delete(s.blocked, k.key)
			l.more = true
		}
	}
	l.lose(done.lost)
	return nil
}

func (l *lane) block(k keyRef, delay time.Duration) {
	if s := l.find(k.shard); s != nil {
		s.blocked[k.key] = true
		l.dueIn(delay)
	}
}

func (l *lane) dueIn(delay time.Duration) {
	if at := time.Now().Add(delay); at.Before(l.nextDue) {
		l.nextDue = at
	}
}

func (l *lane) advanceFloors(resolved int64, rows, left []row) {
	remaining := make(map[int16]int64)
	for _, r := range slices.Backward(left) {
		remaining[r.shard] = r.id
	}
	var bytes int64
	for i := range rows {
		bytes += int64(len(rows[i].Payload))
	}
	cut := bytes >= l.cfg.BatchBytes
	limits, got := make([]int32, len(l.shards)), make([]int, len(l.shards))
	for i, s := range l.shards {
		for len(rows) > 0 && rows[0].shard < s.shard { // of a shard that was lost meanwhile
			rows = rows[1:]
		}
		n := 0
		for n < len(rows) && rows[n].shard == s.shard {
			n++
		}
		read := rows[:n]
		rows = rows[n:]
		s.floor = advance(s.floor, resolved, read, remaining[s.shard], n < int(s.limit) && !cut)
		limits[i], got[i] = s.limit, n
	}
	fairLimits(limits, got, l.cfg.Batch)
	for i, s := range l.shards {
		s.limit = limits[i]
	}
}
