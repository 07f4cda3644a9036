// Package outbox stores messages in the business transaction and relays them to a broker.
//
// [Enqueue] writes messages in the caller's transaction: they exist if and only if it commits. A [Relay] publishes them
// at least once; every copy carries the same id and bytes. Messages with one key are confirmed one after the other, in the order of their
// positions: this is commit order if the application serialises the transactions of one key, by a row lock or a version.
// A message that fails blocks its own key only.
//
// Not promised: that a message is published once (a relay that dies repeats at most what it had in flight), any order
// between keys, and order within a key across transactions that the application lets overlap.
package outbox

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// DefaultChannel is the channel of a message that names none.
const DefaultChannel = "default"

const (
	channelMax     = 63
	topicMax       = 255
	keyMax         = 512
	contentTypeMax = 255
	enqueueMax     = 256 << 20 // bytes of one Enqueue; PostgreSQL cannot take an array of 1 GiB
	overhead       = 64        // bytes that a message takes beside its own
)

// Config sets the limits of a [Box]. The zero value is usable.
type Config struct {
	Schema     string // default "commitbox"
	HeadersMax int    // bytes of a message's header names and values together; default 64 KiB
	PayloadMax int    // bytes of a message's payload; default 1 MiB, at most 128 MiB

	// CommitOrder makes Enqueue lock the keys of its messages until the transaction ends, before it draws positions. The
	// order within a key is then commit order even if the application does not serialise the transactions of a key.
	// It has to be set wherever messages of these keys are enqueued. Transactions that enqueue for several keys in
	// several calls can deadlock (40P01): retry them, or enqueue in one call. The SQL function enqueue takes no such lock.
	CommitOrder bool

	// Trace returns headers to store with every message, such as traceparent and tracestate of the request in ctx. A header
	// that the message has already wins; one that has its own traceparent gets no tracestate of another trace. A traceparent
	// that is not valid (W3C Trace Context) is left out, with its tracestate. The publisher hands them on, so that it and a
	// consumer can link their work to the request that enqueued, and never to the one that happened to publish: see
	// Record.TraceContext and the example. They count for HeadersMax. Default: none.
	Trace func(ctx context.Context) map[string]string
}

func (c Config) check() (Config, error) {
	c.HeadersMax = cmp.Or(c.HeadersMax, 64<<10)
	c.PayloadMax = cmp.Or(c.PayloadMax, 1<<20)
	var errs []error
	if c.HeadersMax < 0 {
		errs = append(errs, errors.New("HeadersMax is negative"))
	}
	if c.PayloadMax < 0 || c.PayloadMax > enqueueMax/2 {
		errs = append(errs, fmt.Errorf("PayloadMax is %d, not between 1 and %d", c.PayloadMax, enqueueMax/2))
	}
	return c, errors.Join(errs...)
}

// Box is an outbox with its limits. It is safe for concurrent use and needs no closing.
type Box struct {
	schema schema.Name
	cfg    Config
}

// New returns an outbox with limits or a schema of its own. Where the defaults do, use [Enqueue].
func New(cfg Config) (*Box, error) {
	name, schemaErr := schema.Parse(cfg.Schema)
	cfg, err := cfg.check()
	if err := errors.Join(schemaErr, err); err != nil {
		return nil, fmt.Errorf("outbox: configuration: %w", err)
	}
	return &Box{name, cfg}, nil
}

var standard, _ = New(Config{})

// Enqueue stores messages in tx with the default limits; see [Box.Enqueue].
func Enqueue(ctx context.Context, tx pgx.Tx, messages ...Message) ([]uuid.UUID, error) {
	return standard.Enqueue(ctx, tx, messages...)
}

// Enqueue stores messages in tx, in the order given, with one statement, and returns their ids. They are published after
// tx has committed, and never if it is rolled back, to a savepoint too. Messages for later take one more statement.
//
// Bad input is answered with a *commitbox.InputError that names the field, before anything is sent: none of the messages
// is stored, and tx can go on. Any other error comes from PostgreSQL and has aborted tx. Not promised: that a relay
// serves the channel, and a time by which a message is published.
func (b *Box) Enqueue(ctx context.Context, tx pgx.Tx, messages ...Message) ([]uuid.UUID, error) {
	if err := check.Tx(ctx, tx); err != nil {
		return nil, err
	}
	if len(messages) == 0 {
		return nil, nil
	}
	ids, params, err := b.prepare(ctx, messages)
	if err != nil {
		return nil, err
	}
	if err := b.store(ctx, db.New(b.schema.On(tx)), params); err != nil {
		return nil, fmt.Errorf("outbox: enqueue %d messages, first id %s: %w", len(ids), ids[0], check.Ended(err))
	}
	return ids, nil
}

// prepare checks the messages, with the headers of the request in ctx, and lays them out as columns.
func (b *Box) prepare(ctx context.Context, messages []Message) ([]uuid.UUID, columnsOf, error) {
	var traced map[string]string
	if b.cfg.Trace != nil {
		traced = b.cfg.Trace(ctx)
	}
	return b.encode(messages, traced)
}

func (b *Box) store(ctx context.Context, q *db.Queries, p columnsOf) error {
	if err := b.storeNow(ctx, q, p.now); err != nil || len(p.dueAts) == 0 {
		return err
	}
	return q.Schedule(ctx, db.ScheduleParams{
		DueAts: p.dueAts, MessageIds: p.later.MessageIds, Channels: p.later.Channels, Keys: p.later.Keys,
		Topics: p.later.Topics, ContentTypes: p.later.ContentTypes, Headers: p.later.Headers, Payloads: p.later.Payloads,
	})
}

func (b *Box) storeNow(ctx context.Context, q *db.Queries, p db.EnqueueParams) error {
	switch {
	case len(p.MessageIds) == 0:
		return nil
	case b.cfg.CommitOrder:
		return q.EnqueueInCommitOrder(ctx, db.EnqueueInCommitOrderParams(p))
	case len(p.MessageIds) > 1:
		return q.Enqueue(ctx, p)
	}
	return q.EnqueueOne(ctx, db.EnqueueOneParams{
		MessageID: p.MessageIds[0], Channel: p.Channels[0], Key: p.Keys[0], Topic: p.Topics[0],
		ContentType: p.ContentTypes[0], Headers: p.Headers[0], Payload: p.Payloads[0],
	})
}

// columnsOf is messages laid out as the columns of their tables.
type columnsOf struct {
	now, later db.EnqueueParams
	dueAts     []time.Time // of later
}

func (c *columnsOf) add(m *Message, headers string) {
	p := &c.now
	if !m.DeliverAt.IsZero() {
		p = &c.later
		c.dueAts = append(c.dueAts, m.DeliverAt)
	}
	p.MessageIds = append(p.MessageIds, pgID(m.ID))
	p.Channels = append(p.Channels, m.Channel)
	p.Keys = append(p.Keys, m.Key)
	p.Topics = append(p.Topics, m.Topic)
	p.ContentTypes = append(p.ContentTypes, m.ContentType)
	p.Headers = append(p.Headers, headers)
	p.Payloads = append(p.Payloads, m.Payload)
}

// encode checks the messages and lays them out as columns.
func (b *Box) encode(messages []Message, traced map[string]string) ([]uuid.UUID, columnsOf, error) {
	ids := make([]uuid.UUID, len(messages))
	var p columnsOf
	total := 0
	for i, m := range messages {
		m.Channel = cmp.Or(m.Channel, DefaultChannel)
		m.Headers = withTrace(m.Headers, traced)
		if err := b.check(m); err != nil {
			return nil, p, inMessage(i, len(messages), err)
		}
		if m.ID == uuid.Nil {
			id, err := uuid.NewV7()
			if err != nil {
				return nil, p, fmt.Errorf("outbox: make a message id: %w", err)
			}
			m.ID = id
		}
		headers, err := encodeHeaders(m.Headers)
		if err != nil {
			return nil, p, fmt.Errorf("outbox: encode headers of message %s: %w", m.ID, err)
		}
		if m.Payload == nil {
			m.Payload = []byte{}
		}
		ids[i] = m.ID
		total += len(m.Payload) + len(headers) + len(m.Channel) + len(m.Key) + len(m.Topic) + len(m.ContentType) + overhead
		p.add(&m, headers)
	}
	return ids, p, check.Size("messages", total, enqueueMax)
}

// check refuses what PostgreSQL or the limits would refuse. The first problem is reported.
func (b *Box) check(m Message) error {
	return cmp.Or(
		check.Text("Channel", m.Channel, channelMax),
		check.Text("Topic", m.Topic, topicMax),
		check.OptionalText("Key", m.Key, keyMax),
		check.OptionalText("ContentType", m.ContentType, contentTypeMax),
		check.Size("Payload", len(m.Payload), b.cfg.PayloadMax),
		b.checkHeaders(m.Headers),
		checkTime(m.DeliverAt),
	)
}

func checkTime(at time.Time) error {
	if year := at.Year(); year < 1 || year > 9999 {
		return &commitbox.InputError{Field: "DeliverAt", Problem: "is not within the years 1 to 9999"}
	}
	return nil
}

// withTrace adds headers that a message does not have; the message's own are not changed.
func withTrace(own, traced map[string]string) map[string]string {
	if len(traced) == 0 {
		return own
	}
	all := maps.Clone(traced)
	if _, has := own[traceParent]; has || check.TraceID(all[traceParent]) == "" {
		delete(all, traceParent)
		delete(all, traceState)
	}
	maps.Copy(all, own)
	return all
}

func (b *Box) checkHeaders(headers map[string]string) error {
	size := 0
	for name, value := range headers {
		size += len(name) + len(value)
		if err := cmp.Or(
			check.Text("Headers name", name, b.cfg.HeadersMax),
			check.OptionalText("Headers value", value, b.cfg.HeadersMax),
		); err != nil {
			return err
		}
	}
	return check.Size("Headers", size, b.cfg.HeadersMax)
}

// inMessage completes the field of a refusal with the message that it stands in.
func inMessage(i, of int, err error) error {
	if input := (*commitbox.InputError)(nil); errors.As(err, &input) {
		in := "Message."
		if of > 1 {
			in = fmt.Sprintf("messages[%d].", i)
		}
		input.Field = in + input.Field
	}
	return err
}

func encodeHeaders(headers map[string]string) (string, error) {
	if len(headers) == 0 {
		return "{}", nil
	}
	text, err := json.Marshal(headers)
	return string(text), err
}
