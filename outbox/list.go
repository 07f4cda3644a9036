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

// Stats is the state of a channel.
type Stats struct {
	Pending      int           // messages that nobody has tried yet, or that are being sent
	PendingExact bool          // false: a shard has more than 10 000, and Pending is an estimate that counts other channels too
	Oldest       time.Duration // age of the oldest message that is pending or deferred; 0 if there is none
	Deferred     int           // failed messages, and those behind them
	BlockedKeys  int
	Dead         int // without the discarded ones
	Discarded    int
	Scheduled    int // for later
	Relays       int // with a lease that has not ended
}

// Stats counts. It is cheap enough to be asked every ten seconds whatever the backlog is: about 640 000 index entries
// are read at most.
func (o *Operator) Stats(ctx context.Context, channel string) (Stats, error) {
	s, err := db.New(o.schema.On(o.pool)).OutboxStats(ctx, channel)
	if err != nil {
		return Stats{}, fmt.Errorf("outbox: stats of channel %s: %w", channel, err)
	}
	return Stats{
		Pending: int(s.Pending), PendingExact: s.PendingExact, Oldest: time.Duration(s.OldestSeconds * float64(time.Second)), Deferred: int(s.Deferred),
		BlockedKeys: int(s.BlockedKeys), Dead: int(s.Dead), Discarded: int(s.Discarded), Scheduled: int(s.Scheduled), Relays: int(s.Relays),
	}, nil
}

// BlockedKey is a key that does not flow.
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
// is not full is the last one.
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

// DeadMessage is a message that was given up.
type DeadMessage struct {
	ID          uuid.UUID
	Position    int64 // for the next page
	Topic, Key  string
	Attempts    int
	EnqueuedAt  time.Time
	DiedAt      time.Time
	LastError   string
	PayloadLen  int
	DiscardedAt time.Time // zero: not discarded
	DiscardedBy string
}

// Dead lists a page of the channel's dead messages by position, those after a position, of a topic or of all; limit 0 is
// 100, at most 1000. A page that is not full is the last one.
func (o *Operator) Dead(ctx context.Context, channel, topic string, after int64, limit int) ([]DeadMessage, error) {
	rows, err := db.New(o.schema.On(o.pool)).OutboxDead(ctx, db.OutboxDeadParams{Channel: channel, Topic: topic, AfterID: after, Page: page(limit)})
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
