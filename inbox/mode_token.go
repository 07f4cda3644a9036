package inbox

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
)

// finishTries bounds how often a finished message is told to Redis. It is idempotent by its token.
const finishTries = 3

// withToken takes the message's token in Redis, handles the message, and finishes or gives back the token. A waiter
// competes for the token again and again, so that it takes over when the winner fails.
func (b *Box) withToken(ctx context.Context, m *Message, run handler) verdict {
	start := time.Now()
	token := uuid.NewString()
	until := start.Add(b.Wait)
	for wait := newPoll(b.Wait); ; {
		state, entry, left, err := b.begin(ctx, m.ID, token)
		switch {
		case err != nil:
			if v, refused := b.storeDown(m.ID, err); refused {
				return v
			}
			return b.waitingUntil(until).underToken(ctx, m, run, "store_down")
		case state == GuardDone:
			return finished(entry, m)
		case state == GuardGranted:
			return b.waitingUntil(until).hold(ctx, m, token, start, run)
		case !wait.next(ctx):
			return verdict{outcome: InProgress, after: left, by: ByCache}
		}
	}
}

func (b *Box) begin(ctx context.Context, id ID, token string) (state GuardState, entry CacheEntry, left time.Duration, err error) {
	if b.Guard == nil {
		return state, entry, left, errNoGuard
	}
	return b.Guard.Begin(ctx, id, token, b.LeaseFor)
}

// hold handles a message whose token this call holds.
func (b *Box) hold(ctx context.Context, m *Message, token string, start time.Time, run handler) verdict {
	held, release := b.renewToken(ctx, m.ID, token)
	defer release()
	settled := false
	defer func() {
		if !settled { // runtime.Goexit: nobody waits for the answer
			b.giveBack(ctx, m.ID, token)
		}
	}()
	var stored []byte
	v := b.underToken(held, m, func(ctx context.Context, tx pgx.Tx) (_ []byte, err error) {
		stored, err = run(ctx, tx)
		if err == nil && errors.Is(context.Cause(held), ErrLeaseLost) {
			err = ErrLeaseLost // another one may be running it: nothing is committed
		}
		return stored, err
	}, "")
	settled = true
	release()
	switch {
	case v.outcome == Executed:
		v.copy = b.completedSince(start, m.Fingerprint, stored)
		b.finish(ctx, m.ID, token, v.copy)
	case v.outcome == Replayed && v.copy != nil: // the table knew it: tell those who ask Redis alone
		b.finish(ctx, m.ID, token, v.copy)
	case v.outcome != Unknown: // it may be committed: the token runs out by itself
		b.giveBack(ctx, m.ID, token)
	}
	return v
}

// underToken runs the message in the guards that are left: the row, what the table knows, or none. without says why no
// token is held.
func (b *Box) underToken(ctx context.Context, m *Message, run handler, without string) verdict {
	switch {
	case b.policy.row:
		return b.withRow(ctx, m, run)
	case without != "" && !b.policy.readRow:
		return b.uncovered(ctx, m, run, "")
	}
	v := b.processBare(ctx, m, run, b.policy.readRow)
	if v.outcome == Executed && without == "" {
		v.by = ByCache
	}
	return v
}

// renewToken renews a token until release is called. The context ends when it is lost.
func (b *Box) renewToken(ctx context.Context, id ID, token string) (_ context.Context, release func()) {
	held, lose := context.WithCancelCause(ctx)
	renewing, stop := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		until := time.Now().Add(b.LeaseFor)
		for sleep(renewing, b.LeaseFor/3) {
			asked := time.Now()
			ok, err := b.Guard.Renew(renewing, id, token, b.LeaseFor)
			switch {
			case err == nil && ok:
				until = asked.Add(b.LeaseFor)
			case renewing.Err() != nil:
			case err == nil, time.Now().Add(b.LeaseFor / 3).After(until):
				b.Observer.Observe(commitbox.InboxUnguarded, 1, id.Consumer, "token_lost")
				lose(ErrLeaseLost)
				return
			}
		}
	}()
	return held, func() {
		stop()
		<-done
		lose(nil)
	}
}

// finish tells Redis that a message is done. If it does not take it, the handler has succeeded all the same; the token
// runs out and a later copy may run, which is what the level weak means.
func (b *Box) finish(ctx context.Context, id ID, token string, c *rowCopy) {
	ctx, cancel := detached(ctx)
	defer cancel()
	left := b.policy.Retention - c.age
	if left <= 0 {
		return
	}
	for try := range finishTries {
		if try > 0 && !sleep(ctx, jitter(pollFirst<<try)) {
			break
		}
		ok, err := b.Guard.Finish(ctx, id, token, c.CacheEntry, left)
		if err == nil && !ok {
			break
		}
		if err == nil {
			return
		}
	}
	b.Observer.Observe(commitbox.InboxUnguarded, 1, id.Consumer, "token_lost")
}

// giveBack lets the next one run. If Redis does not answer, the token runs out.
func (b *Box) giveBack(ctx context.Context, id ID, token string) {
	ctx, cancel := detached(ctx)
	defer cancel()
	_, _ = b.Guard.Release(ctx, id, token)
}
