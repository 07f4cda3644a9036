package inbox

import (
	"bytes"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
)

var errNoGuard = errors.New("the policy asks for Redis and Config.Guard is not set")

// byMode handles a message as the policy says. Without one the row guards.
func (b *Box) byMode(ctx context.Context, m *Message, run handler) verdict {
	if b.isNested(ctx, m.ID, b.pool) {
		return verdict{outcome: InProgress, err: ErrNested}
	}
	if b.policy != nil && b.policy.Mode == ModeOff {
		return b.uncovered(ctx, m, run, "off")
	}
	until := time.Now().Add(b.Wait)
	return b.flights.do(ctx, flightOf(m), until, func(begun func()) verdict {
		return b.waitingUntil(until).lead(ctx, m, func(ctx context.Context, tx pgx.Tx) ([]byte, error) {
			begun()
			return run(ctx, tx)
		})
	})
}

// waitingUntil returns a box that waits for what is left of the time, so that waits in turn do not add up.
func (b *Box) waitingUntil(until time.Time) *Box {
	if b.Wait == 0 {
		return b
	}
	left := *b
	left.Wait = max(0, time.Until(until))
	return &left
}

// lead asks the stores that the policy names, in the order in which they are quick.
func (b *Box) lead(ctx context.Context, m *Message, run handler) verdict {
	if b.policy == nil {
		return b.process(ctx, m, run)
	}
	v, known := b.known(ctx, m, b.policy.readToken)
	switch {
	case known:
		return v
	case v.away:
		b = b.withoutFront()
	}
	if b.policy.token {
		return b.withToken(ctx, m, run)
	}
	return b.withRow(ctx, m, run)
}

// known asks the stores that can only answer and are not written.
func (s *settings) known(ctx context.Context, m *Message, readTokens bool) (verdict, bool) {
	if s.policy.snapshot == nil {
		return unavailable(errNoPolicy), true
	}
	front, known := s.askFront(ctx, m)
	if known || !readTokens {
		return front, known
	}
	v, known := s.readTokens(ctx, m)
	v.away = front.away
	return v, known
}

// knownElsewhere is known for work that has a row in every mode, because a token could not be finished (the commit is the
// caller's) or could not hold what a row does (a lease with steps). Such work only reads what Process finished in Redis.
func (s *settings) knownElsewhere(ctx context.Context, m *Message) (verdict, bool) {
	if s.policy == nil {
		return verdict{}, false
	}
	return s.known(ctx, m, s.policy.token || s.policy.readToken)
}

// askFront asks the cache in front of the table, if that is worth it. A copy with another fingerprint is no answer: the table
// confirms it.
func (s *settings) askFront(ctx context.Context, m *Message) (verdict, bool) {
	if !s.policy.front || !s.cold.ask(m) {
		return verdict{}, false
	}
	entry, found, err := s.Cache.Get(ctx, s.policy.snapshot.identity, m.ID)
	if err == nil {
		s.cold.tell(m, found)
	}
	if err != nil || !found || mismatch(entry.Fingerprint, m.Fingerprint) {
		return verdict{away: err != nil}, false
	}
	return verdict{outcome: Replayed, result: entry.Result, by: ByCache}, true
}

// fill keeps a copy of a row that is committed, for what is left of its retention, under the identity that the database
// had before it was claimed. Nobody waits for it: a copy that is late, or that the cache does not take, costs speed.
func (s *settings) fill(ctx context.Context, id ID, c *rowCopy) {
	if s.policy == nil || !s.policy.front || c == nil {
		return
	}
	left := s.policy.Retention - c.age
	if left <= 0 {
		return
	}
	select {
	case s.copies <- struct{}{}:
	default:
		return
	}
	of, done := s.policy.snapshot.identity, func() { <-s.copies }
	if later, ok := s.Cache.(laterCache); ok {
		later.PutLater(of, id, c.CacheEntry, left, done)
		return
	}
	entry := c.CacheEntry // less what the caller may change from now on
	entry.Fingerprint, entry.Result = bytes.Clone(entry.Fingerprint), bytes.Clone(entry.Result)
	go func() {
		defer done()
		_ = s.Cache.Put(context.WithoutCancel(ctx), of, id, entry, left)
	}()
}

// withoutFront is this box for the rest of a call in which the cache in front failed, so that it costs one time budget.
func (b *Box) withoutFront() *Box {
	p := *b.policy
	p.front = false
	behind := *b
	behind.policy = &p
	return &behind
}

// completedSince is the copy of a row whose commit is confirmed and whose claim was sent after start: it is at most as
// old as that, so what is left of its retention is not overstated.
func (s *settings) completedSince(start time.Time, fingerprint, stored []byte) *rowCopy {
	age := time.Since(start)
	finished := time.Now()
	if s.policy != nil && s.policy.snapshot != nil {
		finished = s.policy.snapshot.now.Add(start.Sub(s.policy.snapshot.asked))
	}
	return &rowCopy{CacheEntry{Fingerprint: fingerprint, FinishedAt: finished, Result: stored}, age}
}

// withRow claims the row, and fills the cache once its commit is confirmed, or once it was read as committed.
func (b *Box) withRow(ctx context.Context, m *Message, run handler) verdict {
	start := time.Now()
	var stored []byte
	v := b.process(ctx, m, func(ctx context.Context, tx pgx.Tx) (_ []byte, err error) {
		stored, err = run(ctx, tx)
		return stored, err
	})
	if v.outcome == Executed {
		v.copy = b.completedSince(start, m.Fingerprint, stored)
	}
	b.fill(ctx, m.ID, v.copy)
	return v
}

// readTokens asks Redis for what was finished there. Nothing is written.
func (s *settings) readTokens(ctx context.Context, m *Message) (verdict, bool) {
	if s.Guard == nil {
		return s.storeDown(m.ID, errNoGuard)
	}
	entry, found, err := s.Guard.Look(ctx, m.ID)
	switch {
	case err != nil:
		return s.storeDown(m.ID, err)
	case !found:
		return verdict{}, false
	}
	return finished(entry, m), true
}

// finished is the answer of a message that Redis knows as finished. There is no row that could confirm a mismatch.
func finished(entry CacheEntry, m *Message) verdict {
	if mismatch(entry.Fingerprint, m.Fingerprint) {
		return verdict{outcome: Mismatch, by: ByCache}
	}
	return verdict{outcome: Replayed, result: entry.Result, by: ByCache}
}

// storeDown says what becomes of a message while a store does not answer: refused, or handled without it.
func (s *settings) storeDown(id ID, cause error) (v verdict, refused bool) {
	if s.policy.StoreDown != StoreDownOpen {
		return unavailable(cause), true
	}
	s.Observer.Observe(commitbox.InboxUnguarded, 1, id.Consumer, "store_down")
	return verdict{}, false
}
