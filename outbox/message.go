package outbox

import (
	"time"

	"github.com/google/uuid"

	"github.com/commitbox/commitbox/internal/check"
)

// Message is what [Enqueue] stores and a [Publisher] sends. Payload and headers reach the broker exactly as given.
type Message struct {
	// ID is the message's identity, the same on every copy that is ever sent. Zero: Enqueue makes a UUIDv7. A producer
	// that may enqueue one thing twice sets it, so that the consumer's inbox sees one message.
	ID uuid.UUID

	// Channel names the destination that the message waits for; it has its own relays. Default "default"; at most
	// 63 bytes. A message whose channel no relay serves waits.
	Channel string

	// Topic says what the message is about; the publisher maps it to a routing key or a topic. Required, at most 255
	// bytes.
	Topic string

	// Key orders messages: those of one key in one channel are published one after the other. Empty: no order. At most
	// 512 bytes.
	Key string

	// ContentType is passed on. At most 255 bytes.
	ContentType string

	// Headers are passed on. Names and values together at most Config.HeadersMax bytes, valid UTF-8 without NUL.
	Headers map[string]string

	// DeliverAt is when the message is to be published, by the database's clock; it takes its place among those of its key
	// then, and blocks nobody before. Zero, or past: at once. Before the year 10000.
	DeliverAt time.Time

	// Payload is opaque. At most Config.PayloadMax bytes; may be empty.
	Payload []byte
}

// Record is a stored message on its way to the broker.
type Record struct {
	Message

	Position   int64     // place in the channel's order; copies of one message made by a requeue have different ones
	EnqueuedAt time.Time // by the database's clock
	Attempt    int       // 1 for the first; a lower bound, because a relay that dies counts nothing
}

// The headers of W3C Trace Context.
const (
	traceParent = "traceparent"
	traceState  = "tracestate"
)

// TraceContext returns the W3C trace context of the request that enqueued the message, from its headers. Both are empty if
// there is none or if its traceparent is not valid, which stops nothing. A publisher makes a link of it, not a parent: the
// request may have ended long ago. Not promised: that the tracestate is valid.
func (r Record) TraceContext() (traceparent, tracestate string) {
	if check.TraceID(r.Headers[traceParent]) == "" {
		return "", ""
	}
	return r.Headers[traceParent], r.Headers[traceState]
}
