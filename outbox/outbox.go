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

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

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
)

// Config sets the limits of a [Box]. The zero value is usable.
type Config struct {
	Schema     string // default "commitbox"
	HeadersMax int    // bytes of a message's header names and values together; default 64 KiB
	PayloadMax int    // bytes of a message's payload; default 1 MiB, at most 128 MiB

	// CommitOrder makes Enqueue lock the keys of its messages until the transaction ends, before it draws positions. The
	// order within a key is then commit order even if the application does not serialise the transactions of a key.
	// It has to be set wherever messages of these keys are enqueued. Transactions that enqueue for several keys in
	// several calls can deadlock (40P01): retry them, or enqueue in one call.
	CommitOrder bool
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
// tx has committed, and never if it is rolled back, to a savepoint too.
//
// Bad input is answered with a *commitbox.InputError that names the field, before anything is sent: none of the messages
// is stored, and tx can go on. Any other error comes from PostgreSQL and has aborted tx.
func (b *Box) Enqueue(ctx context.Context, tx pgx.Tx, messages ...Message) ([]uuid.UUID, error) {
	if err := check.Tx(tx); err != nil {
		return nil, err
	}
	if len(messages) == 0 {
		return nil, nil
	}
	ids, params, err := b.encode(messages)
	if err != nil {
		return nil, err
	}
	q := db.New(b.schema.On(tx))
	if b.cfg.CommitOrder {
		err = q.EnqueueInCommitOrder(ctx, db.EnqueueInCommitOrderParams(params))
	} else {
		err = q.Enqueue(ctx, params)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: enqueue %d messages, first id %s: %w", len(ids), ids[0], check.Ended(err))
	}
	return ids, nil
}

// encode checks the messages and lays them out as columns.
func (b *Box) encode(messages []Message) ([]uuid.UUID, db.EnqueueParams, error) {
	ids := make([]uuid.UUID, len(messages))
	var p db.EnqueueParams
	total := 0
	for i, m := range messages {
		m.Channel = cmp.Or(m.Channel, DefaultChannel)
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
		total += len(m.Payload) + len(headers)
		p.MessageIds = append(p.MessageIds, pgtype.UUID{Bytes: m.ID, Valid: true})
		p.Channels = append(p.Channels, m.Channel)
		p.Keys = append(p.Keys, m.Key)
		p.Topics = append(p.Topics, m.Topic)
		p.ContentTypes = append(p.ContentTypes, m.ContentType)
		p.Headers = append(p.Headers, headers)
		p.Payloads = append(p.Payloads, m.Payload)
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
	)
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
