package inbox

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/db"
)

// batchLenMax bounds the messages of one transaction: each takes an entry of the server's shared lock table.
const batchLenMax = 256

// Answer is what became of one message of a batch. Err is what [Process] would have returned.
type Answer[R any] struct {
	Result[R]
	Err error
}

// ProcessBatch does for many messages of one consumer what [Process] does for one, with one claim and one COMMIT for up
// to 256 of them, and returns one answer per message in the order of msgs. Each answer is settled by itself
// ([Disposition]).
//
// fn gets the messages that are to be run and returns one value for each, in their order (a handler of Void may return
// nil). It is fast when it queues its statements into one pgx.Batch. Its writes commit together; if it fails, they are
// rolled back and fn runs again for each message alone, so that one bad message does not fail its neighbours and one
// failure is one attempt. A message that was delivered before, is held, or is of another consumer than the first one is
// handled alone as well. Copies of a message within msgs get the answer of the first one. If fn ends the transaction,
// each message that it was given is ErrTxEnded.
//
// Not promised: one transaction for all of msgs.
func ProcessBatch[R any](ctx context.Context, box *Box, msgs []Message, fn func(ctx context.Context, tx pgx.Tx, msgs []Message) ([]R, error)) []Answer[R] {
	b := batch[R]{box: box, fn: fn, msgs: msgs, answers: make([]Answer[R], len(msgs))}
	var todo []int
	first := make(map[ID]int, len(msgs))
	for i := range msgs {
		err := checkProcess(box, &msgs[i], fn == nil)
		switch _, seen := first[msgs[i].ID]; {
		case err != nil:
			b.answers[i] = Answer[R]{Result[R]{Outcome: Failed}, err}
		case !seen:
			first[msgs[i].ID] = i
			todo = append(todo, i)
		}
	}
	slices.SortFunc(todo, func(i, j int) int { return strings.Compare(msgs[i].ID.Message, msgs[j].ID.Message) })
	b.runAll(ctx, b.askFront(ctx, todo))
	b.copyAnswers(first)
	return b.answers
}

type batch[R any] struct {
	box     *Box
	fn      func(context.Context, pgx.Tx, []Message) ([]R, error)
	msgs    []Message
	answers []Answer[R]
}

// runAll runs the messages that can share a transaction in chunks, then the others one by one. When the server's lock
// table is full, the chunks are halved.
func (b *batch[R]) runAll(ctx context.Context, todo []int) {
	shared, alone := b.split(todo)
	if len(shared) > 0 {
		box, over := b.box.under(b.msgs[shared[0]].ID.Consumer)
		defer over()
		b.box = box
		if !box.sharesRows() {
			shared, alone = nil, todo
		}
	}
	for size := batchLenMax; len(shared) > 0; {
		n := min(size, len(shared))
		left, err := b.runShared(ctx, shared[:n])
		if sqlState(err) == stateOutOfMemory && n > 1 {
			size = n / 2
			continue
		}
		alone = append(alone, left...)
		shared = shared[n:]
	}
	for _, i := range alone {
		b.runAlone(ctx, i)
	}
}

// split parts the messages of the first one's consumer from the others and from those over the delivery limit.
func (b *batch[R]) split(todo []int) (shared, alone []int) {
	for _, i := range todo {
		if m := &b.msgs[i]; m.ID.Consumer == b.msgs[todo[0]].ID.Consumer && m.Delivery <= b.box.MaxDeliveries && len(todo) > 1 {
			shared = append(shared, i)
		} else {
			alone = append(alone, i)
		}
	}
	return shared, alone
}

func (b *batch[R]) runAlone(ctx context.Context, i int) {
	b.answers[i].Result, b.answers[i].Err = Process(ctx, b.box, b.msgs[i], func(ctx context.Context, tx pgx.Tx) (value R, err error) {
		values, err := b.call(ctx, tx, []int{i})
		if err != nil {
			return value, err
		}
		return values[0], nil
	})
}

// call runs the user's function for some of the messages.
func (b *batch[R]) call(ctx context.Context, tx pgx.Tx, which []int) ([]R, error) {
	msgs := make([]Message, len(which))
	for n, i := range which {
		msgs[n] = b.msgs[i]
	}
	values, err := b.fn(ctx, tx, msgs)
	if _, void := any(values).([]Void); err == nil && void && len(values) == 0 {
		values = make([]R, len(which))
	}
	if err == nil && len(values) != len(which) {
		err = Permanent(fmt.Errorf("the batch handler returned %d values for %d messages", len(values), len(which)))
	}
	return values, err
}

// runShared runs messages in one transaction, again after a serialization failure or a deadlock. It returns those that
// are left to be run alone, and the error that kept the claim from being made.
func (b *batch[R]) runShared(ctx context.Context, which []int) (left []int, err error) {
	start := time.Now()
	for conflicts := 0; ; conflicts++ {
		s := shared{box: b.box, consumer: b.msgs[which[0]].ID.Consumer}
		var values []R
		var results [][]byte
		err := s.run(ctx, b.params(which), func(ctx context.Context, tx pgx.Tx, claimed []int) (stored [][]byte, err error) {
			values, err = b.call(ctx, tx, pick(which, claimed))
			if err != nil {
				return nil, err
			}
			results, err = roundTrips(values, b.box.ResultMax)
			return results, err
		})
		switch {
		case err == nil:
			b.fill(ctx, pick(which, s.claimed), results, start)
			return b.settle(ctx, which, s.claimed, verdict{outcome: Executed, attempt: 1}, values, start), nil
		case s.ended: // alone, they would be replayed
			v := verdict{outcome: Failed, attempt: 1, err: err, seen: new(int64)}
			return b.settle(ctx, which, s.claimed, v, make([]R, len(s.claimed)), start), nil
		}
		if !conflict(err) || conflicts == conflictsMax {
			return which, err
		}
		b.box.Observer.Observe(commitbox.InboxRetries, 1, s.consumer)
		if !sleep(ctx, jitter(pollFirst<<conflicts)) {
			return which, err
		}
	}
}

func (b *batch[R]) params(which []int) db.InboxClaimBatchParams {
	p := db.InboxClaimBatchParams{Consumer: b.msgs[which[0]].ID.Consumer}
	for _, i := range which {
		m := &b.msgs[i]
		p.MessageIds = append(p.MessageIds, m.ID.Message)
		p.Fingerprints = append(p.Fingerprints, append([]byte{}, m.Fingerprint...))
		p.TraceIds = append(p.TraceIds, m.TraceID)
	}
	return p
}

// settle fills the answers of the claimed messages and returns the others.
func (b *batch[R]) settle(ctx context.Context, which, claimed []int, v verdict, values []R, start time.Time) (left []int) {
	next := 0
	for n, i := range which {
		if next == len(claimed) || claimed[next] != n {
			left = append(left, i)
			continue
		}
		b.answers[i].Result, b.answers[i].Err = answer(ctx, &b.box.settings, b.msgs[i].ID, v, values[next], start)
		next++
	}
	return left
}

// copyAnswers gives the copies of a message the answer of the first one.
func (b *batch[R]) copyAnswers(first map[ID]int) {
	for i := range b.msgs {
		at, ok := first[b.msgs[i].ID]
		if !ok || at == i || b.answers[i].Err != nil {
			continue
		}
		id := b.msgs[i].ID
		if mismatch(b.msgs[at].Fingerprint, b.msgs[i].Fingerprint) {
			b.answers[i].Result, b.answers[i].Err = answer(context.Background(), &b.box.settings, id, verdict{outcome: Mismatch}, *new(R), time.Now())
			continue
		}
		b.answers[i] = b.answers[at]
		if b.answers[i].Outcome == Executed {
			b.answers[i].Outcome, b.answers[i].Replayed = Replayed, true
		}
	}
}

func pick[T any](from []T, at []int) []T {
	picked := make([]T, len(at))
	for n, i := range at {
		picked[n] = from[i]
	}
	return picked
}

// roundTrips is roundTrip for each of the values, in their order; nil if there is nothing to store.
func roundTrips[R any](values []R, limit int) ([][]byte, error) {
	all, some := make([][]byte, len(values)), false
	for i := range values {
		stored, err := roundTrip(&values[i], limit)
		if err != nil {
			return nil, err
		}
		all[i], some = stored, some || stored != nil
	}
	if !some {
		return nil, nil
	}
	return all, nil
}
