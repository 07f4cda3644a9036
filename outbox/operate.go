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

	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// ErrNotFound says that there is no message or key in a state that allows what was asked.
var ErrNotFound = errors.New("outbox: no such message or key in a state that allows this")

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
	reasonMax     = 900
	operatorWait  = 2 * time.Second
	requeueMax    = 200 // messages of one transaction: failures in their shards wait for it
	requeueRhythm = 100 * time.Millisecond
)

// Requeue makes a dead message run again, a discarded one too. Where it holds its key (policy hold), it runs first of its key
// again; otherwise it goes to the end. It keeps its id. ErrNotFound: there is no dead message of that id.
func (o *Operator) Requeue(ctx context.Context, channel string, id uuid.UUID, reason string) error {
	return o.change(ctx, channel, "", reason, func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxRequeue(ctx, db.OutboxRequeueParams{Channel: channel, MessageID: pgID(id), Reason: reason})
	})
}

// Discard gives a dead message up: it stays in the table, with who and when, and its key goes on. ErrNotFound: there is no
// dead message of that id, or it is discarded already.
func (o *Operator) Discard(ctx context.Context, channel string, id uuid.UUID, reason string) error {
	return o.change(ctx, channel, "", reason, func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxDiscard(ctx, db.OutboxDiscardParams{Channel: channel, MessageID: pgID(id), Reason: reason})
	})
}

// Retry tries a key that waits for a retry at once. ErrNotFound: it does not wait for one.
func (o *Operator) Retry(ctx context.Context, channel, key, reason string) error {
	return o.change(ctx, channel, key, reason, func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxRetry(ctx, db.OutboxRetryParams{Channel: channel, Key: key, Reason: reason})
	})
}

// Park stops a key until it is released. Its messages are kept in order. ErrNotFound: it is parked already, or a dead message
// holds it.
func (o *Operator) Park(ctx context.Context, channel, key, reason string) error {
	return o.change(ctx, channel, key, reason, func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxPark(ctx, db.OutboxParkParams{Channel: channel, Key: key, Reason: reason})
	})
}

// Release lets a parked key go on. ErrNotFound: it is not parked.
func (o *Operator) Release(ctx context.Context, channel, key, reason string) error {
	return o.change(ctx, channel, key, reason, func(q *db.Queries, reason pgtype.Text) (bool, error) {
		return q.OutboxRelease(ctx, db.OutboxReleaseParams{Channel: channel, Key: key, Reason: reason})
	})
}

// SkipHead takes the first message of a blocked key out of its way and returns its id: a failed one becomes dead, one that
// is dead and holds the key stays dead. The key goes on at once, unless it is parked. ErrNotFound: the key is not blocked,
// or nothing waits in it.
func (o *Operator) SkipHead(ctx context.Context, channel, key, reason string) (uuid.UUID, error) {
	var head pgtype.UUID
	err := o.change(ctx, channel, key, reason, func(q *db.Queries, reason pgtype.Text) (_ bool, err error) {
		head, err = q.OutboxSkipHead(ctx, db.OutboxSkipHeadParams{Channel: channel, Key: key, Reason: reason})
		return head.Valid, err
	})
	return head.Bytes, err
}

// RequeueFilter selects dead messages for [Operator.RequeueMany]. Discarded ones are left alone.
type RequeueFilter struct {
	Channel      string    // default "default"
	Topic        string    // empty: every topic
	Since, Until time.Time // when they died; zero: no bound
	Rate         int       // messages per second; default 100
	DryRun       bool      // only count
	Reason       string
}

// RequeueMany makes dead messages run again, the oldest first, at a rate, until none is left or ctx ends. It returns how many
// it did, or with DryRun how many it would do now. Messages that die meanwhile are among them, so what cannot be sent should
// be left out by Topic or Until.
func (o *Operator) RequeueMany(ctx context.Context, f RequeueFilter) (done int, err error) {
	f.Channel, f.Rate = cmp.Or(f.Channel, DefaultChannel), cmp.Or(f.Rate, 100)
	if err := cmp.Or(check.Text("RequeueFilter.Channel", f.Channel, channelMax), check.OptionalText("RequeueFilter.Topic", f.Topic, topicMax),
		check.OptionalText("RequeueFilter.Reason", f.Reason, reasonMax)); err != nil {
		return 0, err
	}
	if f.Rate < 0 {
		return 0, fmt.Errorf("outbox: RequeueFilter.Rate is %d, not positive", f.Rate)
	}
	started := time.Now()
	for {
		due := int(float64(f.Rate)*(time.Since(started)+requeueRhythm).Seconds()) - done
		n, err := o.requeueSome(ctx, f, min(due, requeueMax))
		if done += n; err != nil {
			return done, fmt.Errorf("outbox: requeue dead messages of channel %s, %d done: %w", f.Channel, done, err)
		}
		if f.DryRun || due > 0 && n == 0 {
			return done, nil
		}
		if ahead := time.Duration(done)*time.Second/time.Duration(f.Rate) - time.Since(started); ahead > 0 && !sleep(ctx, min(ahead, requeueRhythm)) {
			return done, ctx.Err()
		}
	}
}

func (o *Operator) requeueSome(ctx context.Context, f RequeueFilter, atMost int) (n int, err error) {
	if atMost <= 0 && !f.DryRun {
		return 0, nil
	}
	err = o.locked(ctx, func(q *db.Queries) error {
		done, err := q.OutboxRequeueMany(ctx, db.OutboxRequeueManyParams{
			Channel: f.Channel, Topic: optional(f.Topic), Since: optionalTime(f.Since),
			Until: optionalTime(f.Until), AtMost: int32(atMost), DryRun: f.DryRun, Reason: optional(f.Reason),
		})
		n = int(done)
		return err
	})
	return n, err
}

// change checks the names and runs one function.
func (o *Operator) change(ctx context.Context, channel, key, reason string, call func(*db.Queries, pgtype.Text) (bool, error)) error {
	err := cmp.Or(check.Text("channel", channel, channelMax), check.OptionalText("key", key, keyMax), check.OptionalText("reason", reason, reasonMax))
	if err != nil {
		return err
	}
	return o.locked(ctx, func(q *db.Queries) error {
		done, err := call(q, optional(reason))
		if err == nil && !done {
			return ErrNotFound
		}
		return err
	})
}

// locked runs a change in a short transaction that does not wait for long. A deadlock with a relay or another operator is
// tried again.
func (o *Operator) locked(ctx context.Context, change func(*db.Queries) error) error {
	for attempt := 1; ; attempt++ {
		err := pgx.BeginTxFunc(ctx, o.pool, readCommitted, func(tx pgx.Tx) error {
			q := db.New(o.schema.On(tx))
			if err := q.LockTimeout(ctx, fmt.Sprint(operatorWait.Milliseconds())); err != nil {
				return err
			}
			return change(q)
		})
		if pg := (*pgconn.PgError)(nil); !errors.As(err, &pg) || pg.Code != "40P01" || attempt == 5 {
			return err
		}
	}
}

func optional(text string) pgtype.Text { return pgtype.Text{String: text, Valid: text != ""} }

func optionalTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}
