package outbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// ErrNotFound says that there is no message or key in a state that allows what was asked.
var ErrNotFound = errors.New("no such message or key in a state that allows this")

// Operator changes the outbox by hand, while relays run. What it changes in a shard its owner sees within a second; a
// message that is being sent at that moment may still arrive. Every change is written to the audit table with the
// database's user and a reason, which may be empty. The same is there as SQL functions, from outbox_requeue to outbox_park.
//
// It is safe for concurrent use. A change waits for at most two seconds for a relay that records a failure in the same
// shard.
type Operator struct {
	schema schema.Name
	pool   *pgxpool.Pool
}

// NewOperator returns an operator of the outbox in a schema; empty is "commitbox".
func NewOperator(pool *pgxpool.Pool, schemaName string) (*Operator, error) {
	name, err := schema.Parse(schemaName)
	if pool == nil {
		err = errors.Join(err, errors.New("pool is nil"))
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: operator: %w", err)
	}
	return &Operator{name, pool}, nil
}

const (
	reasonMax    = 900
	operatorWait = 2 * time.Second
	stepMax      = 200 // messages of one transaction: failures in their shards wait for it
	stepEvery    = 100 * time.Millisecond
)

// Requeue makes a dead message run again, a discarded one too. Where it holds its key (policy hold), it runs first of its key
// again; otherwise it goes to the end. It keeps its id. ErrNotFound: there is no dead message of that id. Not promised:
// that it can be sent now, and an order with messages of its key that were sent meanwhile.
func (o *Operator) Requeue(ctx context.Context, channel string, id uuid.UUID, reason string) error {
	return o.ofMessage(ctx, "requeue", channel, id, reason, "no dead message has this id", func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxRequeue(ctx, db.OutboxRequeueParams{Channel: channel, MessageID: pgID(id), Reason: reason})
	})
}

// Discard gives a dead message up: it stays in the table, with who and when, and its key goes on. ErrNotFound: there is no
// dead message of that id, or it is discarded already. Not promised: that no copy of it was ever delivered.
func (o *Operator) Discard(ctx context.Context, channel string, id uuid.UUID, reason string) error {
	return o.ofMessage(ctx, "discard", channel, id, reason, "no dead message has this id, or it is discarded already", func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxDiscard(ctx, db.OutboxDiscardParams{Channel: channel, MessageID: pgID(id), Reason: reason})
	})
}

// Retry tries a key that waits for a retry at once. ErrNotFound: it does not wait for one. Not promised: that it
// succeeds; the attempt counts.
func (o *Operator) Retry(ctx context.Context, channel, key, reason string) error {
	return o.ofKey(ctx, "retry", channel, key, reason, "it does not wait for a retry", func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxRetry(ctx, db.OutboxRetryParams{Channel: channel, Key: key, Reason: reason})
	})
}

// Park stops a key until it is released. Its messages are kept in order. The channel need not have been used yet, so a name
// with a mistake in it is taken. ErrNotFound: it is parked already, or a dead message holds it. Not promised: that a
// message that is being sent at that moment is stopped.
func (o *Operator) Park(ctx context.Context, channel, key, reason string) error {
	return o.ofKey(ctx, "park", channel, key, reason, "it is parked already, or a dead message holds it", func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxPark(ctx, db.OutboxParkParams{Channel: channel, Key: key, Reason: reason})
	})
}

// Release lets a parked key go on. ErrNotFound: it is not parked. Not promised: a moment; its owner goes on within a
// second.
func (o *Operator) Release(ctx context.Context, channel, key, reason string) error {
	return o.ofKey(ctx, "release", channel, key, reason, "it is not parked", func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxRelease(ctx, db.OutboxReleaseParams{Channel: channel, Key: key, Reason: reason})
	})
}

// SkipHead takes the first message of a blocked key out of its way and returns its id: a failed one becomes dead, one that
// is dead and holds the key stays dead. The key goes on at once, unless it is parked. ErrNotFound: the key is not blocked,
// or nothing waits in it. Not promised: that the message was not delivered: an attempt that failed may have been.
func (o *Operator) SkipHead(ctx context.Context, channel, key, reason string) (uuid.UUID, error) {
	var head pgtype.UUID
	err := o.ofKey(ctx, "skip the head of", channel, key, reason, "it is not blocked, or nothing waits in it", func(q *db.Queries, reason pgtype.Text) (_ bool, err error) {
		head, err = q.OutboxSkipHead(ctx, db.OutboxSkipHeadParams{Channel: channel, Key: key, Reason: reason})
		return head.Valid, err
	})
	return head.Bytes, err
}

// RequeueFilter selects dead messages for [Operator.RequeueMany]. Discarded ones are left alone.
type RequeueFilter struct {
	Channel      string    // default "default"
	Topic        string    // empty: every topic
	Since, Until time.Time // when they died; Until is not among them, and is at most now, the default
	Rate         int       // messages per second; default 100
	DryRun       bool      // only count
	Reason       string
}

// RequeueMany makes dead messages run again, the oldest first, at a rate, until none is left or ctx ends. It returns how many
// it did, or with DryRun how many it would do now. Those that die meanwhile, or again, are left for the next call. Not
// promised: all or nothing; what was done before an error stays done.
func (o *Operator) RequeueMany(ctx context.Context, f RequeueFilter) (done int, err error) {
	f.Channel, f.Rate = cmp.Or(f.Channel, DefaultChannel), cmp.Or(f.Rate, 100)
	if err := cmp.Or(check.Text("RequeueFilter.Channel", f.Channel, channelMax), check.OptionalText("RequeueFilter.Topic", f.Topic, topicMax),
		check.OptionalText("RequeueFilter.Reason", f.Reason, reasonMax), inOrder("RequeueFilter", f.Since, f.Until), notNegative("RequeueFilter", f.Rate)); err != nil {
		return 0, err
	}
	if f.Until, err = o.end(ctx, "RequeueFilter", f.Since, f.Until); err != nil {
		return 0, fmt.Errorf("outbox: requeue in channel %s: %w", f.Channel, err)
	}
	done, err = atRate(ctx, f.Rate, f.DryRun, func(atMost int) (n int, err error) {
		err = o.locked(ctx, func(q *db.Queries) error {
			done, err := q.OutboxRequeueMany(ctx, db.OutboxRequeueManyParams{
				Channel: f.Channel, Topic: optional(f.Topic), Since: optionalTime(f.Since),
				Until: &f.Until, AtMost: int32(atMost), DryRun: f.DryRun, Reason: optional(f.Reason),
			})
			n = int(done)
			return err
		})
		return n, err
	})
	if err != nil {
		return done, fmt.Errorf("outbox: requeue in channel %s: stopped after %d messages; a new call does the others: %w", f.Channel, done, err)
	}
	return done, nil
}

// atRate repeats a step, for so many messages per second, until it finds none. A dry run is one step.
func atRate(ctx context.Context, rate int, dryRun bool, step func(atMost int) (int, error)) (done int, err error) {
	for started := time.Now(); ; {
		due := int(min(float64(rate)*(time.Since(started)+stepEvery).Seconds()-float64(done), stepMax))
		if due > 0 || dryRun {
			n, err := step(due)
			if done += n; err != nil || n == 0 || dryRun {
				return done, err
			}
		}
		ahead := time.Duration(done)*time.Second/time.Duration(rate) - time.Since(started)
		if (due <= 0 || ahead > 0) && !sleep(ctx, min(max(ahead, stepEvery/10), stepEvery)) {
			return done, ctx.Err()
		}
	}
}

// ReplayFilter selects kept messages for [Operator.Replay].
type ReplayFilter struct {
	Channel      string    // default "default"; its keep_days say how long messages are kept
	Since, Until time.Time // when they were confirmed; Since is required, Until is not among them, and is at most now, the default
	Topic, Key   string    // empty: all
	Rate         int       // messages per second; default 100
	DryRun       bool      // only count
	Reason       string
}

// Replay publishes kept messages again, in the order in which they were confirmed, at a rate. They keep their ids, so that a
// consumer's inbox can tell them, and take new places at the end of their keys. It returns how many it did, or with DryRun
// how many there are. An error says where it stopped. Not promised: the order of the first publication across keys, and
// all or nothing; what was done before an error stays done.
func (o *Operator) Replay(ctx context.Context, f ReplayFilter) (done int, err error) {
	f.Channel, f.Rate = cmp.Or(f.Channel, DefaultChannel), cmp.Or(f.Rate, 100)
	if err := cmp.Or(check.Text("ReplayFilter.Channel", f.Channel, channelMax), check.OptionalText("ReplayFilter.Topic", f.Topic, topicMax),
		check.OptionalText("ReplayFilter.Key", f.Key, keyMax), check.OptionalText("ReplayFilter.Reason", f.Reason, reasonMax), sinceGiven(f.Since),
		inOrder("ReplayFilter", f.Since, f.Until), notNegative("ReplayFilter", f.Rate)); err != nil {
		return 0, err
	}
	if f.Until, err = o.end(ctx, "ReplayFilter", f.Since, f.Until); err != nil {
		return 0, fmt.Errorf("outbox: replay in channel %s: %w", f.Channel, err)
	}
	next := db.ReplayParams{
		Channel: f.Channel, Since: f.Since, Until: f.Until, Topic: optional(f.Topic), Key: optional(f.Key),
		AfterAt: f.Since.Add(-time.Second), DryRun: f.DryRun, Reason: optional(f.Reason),
	}
	done, err = atRate(ctx, f.Rate, f.DryRun, func(atMost int) (n int, err error) {
		next.AtMost = int32(atMost)
		err = o.locked(ctx, func(q *db.Queries) error {
			r, err := q.Replay(ctx, next)
			if n = int(r.Done); err == nil && n > 0 {
				next.AfterAt, next.AfterID = r.LastAt, r.LastID
			}
			return err
		})
		return n, err
	})
	switch {
	case err == nil:
		return done, nil
	case done == 0:
		return 0, fmt.Errorf("outbox: replay in channel %s: stopped before the first message: %w", f.Channel, err)
	}
	return done, fmt.Errorf("outbox: replay in channel %s: stopped after %d messages, the last one confirmed at %s; go on from there with Since: %w",
		f.Channel, done, next.AfterAt.UTC().Format(time.RFC3339Nano), err)
}

// end is until, or the database's now where that comes first: what dies or is kept again meanwhile is not chosen once more.
func (o *Operator) end(ctx context.Context, filter string, since, until time.Time) (time.Time, error) {
	now, err := db.New(o.schema.On(o.pool)).OutboxNow(ctx)
	if err != nil {
		return now, err
	}
	if until.IsZero() || until.After(now) {
		until = now
	}
	return until, inOrder(filter, since, until)
}

func sinceGiven(since time.Time) error {
	if since.IsZero() {
		return &commitbox.InputError{Field: "ReplayFilter.Since", Problem: "is zero"}
	}
	return nil
}

func inOrder(filter string, since, until time.Time) error {
	if !until.IsZero() && until.Before(since) {
		return &commitbox.InputError{Field: filter + ".Until", Problem: "is before Since"}
	}
	return nil
}

func notNegative(filter string, rate int) error {
	if rate < 0 {
		return &commitbox.InputError{Field: filter + ".Rate", Problem: "is negative"}
	}
	return nil
}

// ofKey changes a key by one function; why is what it means if the function says no.
func (o *Operator) ofKey(ctx context.Context, do, channel, key, reason, why string, call func(*db.Queries, pgtype.Text) (bool, error)) error {
	if err := cmp.Or(check.Text("channel", channel, channelMax), check.Text("key", key, keyMax)); err != nil {
		return err
	}
	return o.change(ctx, fmt.Sprintf("%s key %q in channel %s", do, key, channel), reason, why, call)
}

// ofMessage does the same to a message.
func (o *Operator) ofMessage(ctx context.Context, do, channel string, id uuid.UUID, reason, why string, call func(*db.Queries, pgtype.Text) (bool, error)) error {
	if err := check.Text("channel", channel, channelMax); err != nil {
		return err
	}
	return o.change(ctx, fmt.Sprintf("%s message %s in channel %s", do, id, channel), reason, why, call)
}

func (o *Operator) change(ctx context.Context, what, reason, why string, call func(*db.Queries, pgtype.Text) (bool, error)) error {
	if err := check.OptionalText("reason", reason, reasonMax); err != nil {
		return err
	}
	err := o.locked(ctx, func(q *db.Queries) error {
		done, err := call(q, optional(reason))
		if err == nil && !done {
			return fmt.Errorf("%w: %s", ErrNotFound, why)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("outbox: %s: %w", what, err)
	}
	return nil
}

// locked runs a change in a short transaction that does not wait for long. A deadlock with a relay or another operator is
// tried again.
func (o *Operator) locked(ctx context.Context, change func(*db.Queries) error) error {
	for attempt := 1; ; attempt++ {
		changed := false
		err := pgx.BeginTxFunc(ctx, o.pool, readCommitted, func(tx pgx.Tx) error {
			q := db.New(o.schema.On(tx))
			if err := q.LockTimeout(ctx, fmt.Sprint(operatorWait.Milliseconds())); err != nil {
				return err
			}
			err := change(q)
			changed = err == nil
			return err
		})
		if pg := (*pgconn.PgError)(nil); !errors.As(err, &pg) || pg.Code != "40P01" || attempt == 5 {
			return withAdvice(err, changed)
		}
	}
}

// withAdvice says what an operator can do about an error; changed: it is the answer to COMMIT.
func withAdvice(err error, changed bool) error {
	pg := (*pgconn.PgError)(nil)
	switch {
	case errors.As(err, &pg) && (pg.Code == "55P03" || pg.Code == "40P01"):
		return fmt.Errorf("nothing was changed, because a relay or another operator held the shard; try again: %w", err)
	case changed && check.CommitLost(err):
		return fmt.Errorf("whether it was done is not known; the table audit says so: %w", err)
	}
	return err
}

func optional(text string) pgtype.Text { return pgtype.Text{String: text, Valid: text != ""} }

func optionalTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
