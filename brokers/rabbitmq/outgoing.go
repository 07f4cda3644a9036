package rabbitmq

import (
	"bytes"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/outbox"
)

// Headers that the publisher adds.
const (
	// HeaderOutbox is on every message that comes from an outbox, with the value "1". It tells the consumer that all
	// copies of the message have the same bytes.
	HeaderOutbox = "commitbox-outbox"
	// HeaderKey carries the message's key, if it has one.
	HeaderKey = "commitbox-key"
)

const (
	shortStringMax = 255 // bytes in a routing key, a header name and the like
	// frameOverhead covers the frame's own bytes and the fixed properties of a message.
	frameOverhead = 1024
)

// newOutgoing translates a record. The payload is copied, because a write that hangs may outlive the call.
func newOutgoing(r outbox.Record, to Route) outgoing {
	headers := amqp.Table{}
	for name, value := range r.Headers {
		headers[name] = value
	}
	headers[HeaderOutbox] = "1"
	if r.Key != "" {
		headers[HeaderKey] = r.Key
	}
	return outgoing{
		exchange:  to.Exchange,
		key:       to.Key,
		mandatory: !to.AllowUnroutable,
		message: amqp.Publishing{
			MessageId:    r.ID.String(),
			ContentType:  r.ContentType,
			DeliveryMode: amqp.Persistent,
			Timestamp:    r.EnqueuedAt,
			Headers:      headers,
			Body:         bytes.Clone(r.Payload),
		},
	}
}

// check refuses what the protocol cannot carry: sending it would break the connection.
func (o outgoing) check() error {
	for what, text := range map[string]string{"routing key": o.key, "exchange name": o.exchange, "content type": o.message.ContentType} {
		if len(text) > shortStringMax {
			return o.failed(fmt.Errorf("%w: the %s has %d bytes, the limit is %d", ErrTooLarge, what, len(text), shortStringMax))
		}
	}
	for name := range o.message.Headers {
		if len(name) > shortStringMax {
			return o.failed(fmt.Errorf("%w: a header name has %d bytes, the limit is %d", ErrTooLarge, len(name), shortStringMax))
		}
	}
	return nil
}

// fits refuses headers that do not go into one frame, which the protocol demands.
func (o outgoing) fits(frameMax int) error {
	size := frameOverhead + fieldSize(o.message.Headers)
	if frameMax > 0 && size > frameMax {
		return o.failed(fmt.Errorf("%w: the headers have up to %d bytes, the broker's frame_max is %d", ErrTooLarge, size, frameMax))
	}
	return nil
}

// fieldMax covers the type and the length of a header's value, and all of one that is neither text nor a collection.
const fieldMax = 16

// fieldSize is the most bytes that a header's value takes on the wire.
func fieldSize(value any) int {
	size := fieldMax
	switch v := value.(type) {
	case string:
		size += len(v)
	case []byte:
		size += len(v)
	case []any:
		for _, element := range v {
			size += fieldSize(element)
		}
	case amqp.Table:
		for name, element := range v {
			size += 1 + len(name) + fieldSize(element)
		}
	}
	return size
}
