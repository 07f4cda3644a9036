package outbox

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/commitbox/commitbox/internal/db"
)

const (
	pageDefault = 100
	pageMax     = 1000
)

// Stats is the state of a channel. A count is exact up to 10 000 messages in each of 64 shards, and said to be an estimate
// beyond, which counts other channels too; scheduled messages and blocked keys up to 640 000. Not promised: that what is
// counted was not sent: a message counts until its confirmation is recorded.
type Stats struct {
	Pending        int           // messages that have not failed: not tried yet, being sent, or tried while their destination was away
	PendingExact   bool          // false: Pending is an estimate
	Oldest         time.Duration // age of the oldest among the first of each shard, pending or deferred; 0 if there is none
	Deferred       int           // failed messages, those behind them, and those of parked keys
	BlockedKeys    int
	DeferredExact  bool // false: Deferred is an estimate, or there are more BlockedKeys
	Dead           int  // without the discarded ones
	Discarded      int
	DeadExact      bool // false: Dead and Discarded are estimates
	Scheduled      int  // for later
	ScheduledExact bool // false: Scheduled is an estimate
	Relays         int  // with a lease that has not ended
}

// Stats counts. It is cheap enough to be asked every ten seconds, whatever lies in the tables: no more index entries are read
// than the counts above say, and far fewer once a shard has more than 10 000 messages. A channel that
// does not exist has nothing. Not promised: one snapshot, while relays run.
func (o *Operator) Stats(ctx context.Context, channel string) (Stats, error) {
	s, err := db.New(o.schema.On(o.pool)).OutboxStats(ctx, channel)
	if err != nil {
		return Stats{}, fmt.Errorf("outbox: stats of channel %s: %w", channel, err)
	}
	return Stats{
		Pending: int(s.Pending), PendingExact: s.PendingExact, Oldest: time.Duration(s.OldestSeconds * float64(time.Second)),
		Deferred: int(s.Deferred), BlockedKeys: int(s.BlockedKeys), DeferredExact: s.DeferredExact,
		Dead: int(s.Dead), Discarded: int(s.Discarded), DeadExact: s.DeadExact,
		Scheduled: int(s.Scheduled), ScheduledExact: s.ScheduledExact, Relays: int(s.Relays),
	}, nil
}

// BlockedKey is a key that does not flow. Not promised: that all its messages are counted in Waiting; those that no relay
// has met yet are still among the pending ones.
type BlockedKey struct {
	Key     string
	Reason  string // retry: its head failed and is tried again; dead: its head is dead and holds it; parked: by an operator
	Since   time.Time
	DueIn   time.Duration // until the next try; meaningless unless Reason is retry
	Waiting int           // messages that wait in it, counted up to 10 000

	// The message at its head; zero if none waits.
	Head      uuid.UUID
	Topic     string
	Attempts  int
	LastError string
}

// Blocked lists a page of the channel's blocked keys by name, those after a key; limit 0 is 100, at most 1000. A page that
// is not full is the last one. Not promised: one snapshot of several pages.
func (o *Operator) Blocked(ctx context.Context, channel, after string, limit int) ([]BlockedKey, error) {
	rows, err := db.New(o.schema.On(o.pool)).OutboxBlocked(ctx, db.OutboxBlockedParams{Channel: channel, AfterKey: after, Page: page(limit)})
	if err != nil {
		return nil, fmt.Errorf("outbox: list blocked keys of channel %s: %w", channel, err)
	}
	keys := make([]BlockedKey, len(rows))
	for i, r := range rows {
		keys[i] = BlockedKey{
			Key: r.Key, Reason: r.Reason, Since: r.Since, DueIn: time.Duration(r.DueIn * float64(time.Second)),
			Waiting: int(r.Waiting), Head: r.Head.Bytes, Topic: r.Topic, Attempts: int(r.Attempts), LastError: r.LastError,
		}
	}
	return keys, nil
}

// DeadMessage is a message that was given up. Not promised: that it was never delivered; an attempt that failed may have been.
type DeadMessage struct {
	ID          uuid.UUID
	Position    int64
	Topic, Key  string
	Attempts    int
	EnqueuedAt  time.Time
	DiedAt      time.Time
	LastError   string
	PayloadLen  int
	DiscardedAt time.Time // zero: not discarded
	DiscardedBy string
}

// DeadCursor is a place in a list of dead messages. It stays valid while they come and go.
type DeadCursor struct {
	Position int64
	ID       uuid.UUID // a server that lost commits may give a position twice
}

// Cursor returns the message's place in a list.
func (m DeadMessage) Cursor() DeadCursor { return DeadCursor{m.Position, m.ID} }

// Dead lists a page of the channel's dead messages by position, those after a place, of a topic or of all; limit 0 is 100, at
// most 1000. The zero cursor is the start. A page that is not full is the last one. Not promised: one snapshot of
// several pages.
func (o *Operator) Dead(ctx context.Context, channel, topic string, after DeadCursor, limit int) ([]DeadMessage, error) {
	rows, err := db.New(o.schema.On(o.pool)).OutboxDead(ctx, db.OutboxDeadParams{
		Channel: channel, Topic: topic, AfterID: after.Position, AfterMessage: pgID(after.ID), Page: page(limit),
	})
	if err != nil {
		return nil, fmt.Errorf("outbox: list dead messages of channel %s: %w", channel, err)
	}
	list := make([]DeadMessage, len(rows))
	for i, r := range rows {
		list[i] = DeadMessage{
			ID: r.MessageID.Bytes, Position: r.ID, Topic: r.Topic, Key: r.Key, Attempts: int(r.Attempts), EnqueuedAt: r.CreatedAt,
			DiedAt: r.DeadAt, LastError: r.LastError, PayloadLen: int(r.PayloadLen), DiscardedBy: r.DiscardedBy,
		}
		if r.DiscardedAt != nil {
			list[i].DiscardedAt = *r.DiscardedAt
		}
	}
	return list, nil
}

func page(limit int) int32 { return int32(min(max(cmp.Or(limit, pageDefault), 1), pageMax)) }
