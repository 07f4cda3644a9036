package rabbitmq

import (
	"fmt"
	"maps"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/check"
)

// Headers that the consumer adds when it moves a message to the retry queue or the dead-letter queue, where the
// broker would forget them.
const (
	HeaderTopic      = "commitbox-topic"      // the first routing key
	HeaderExchange   = "commitbox-exchange"   // the first exchange
	HeaderDeliveries = "commitbox-deliveries" // how many deliveries the message has used up, in the retry queue only
	HeaderReason     = "commitbox-reason"     // why it is in the dead-letter queue, such as "dead" or "missing_id"
)

const headerPrefix = "commitbox-"

// Delivery is a message that a [Consumer] hands to its handler.
//
// Headers holds the headers with one value (text, numbers, booleans, times in RFC 3339), without those of this
// package. Delivery, the count, is 0 when the broker does not tell: a classic queue only says that it is not the first.
type Delivery struct {
	inbox.Message

	Topic       string // the routing key that the message was published with
	Exchange    string // the exchange that the message was published to
	Key         string // the ordering key of an outbox message
	ContentType string
	Redelivered bool // the broker has delivered it before
}

// newDelivery translates a delivery. The count is still to be set by the caller, and the id when it is not the
// message_id property.
func newDelivery(consumer string, d amqp.Delivery) Delivery {
	headers := plainHeaders(d.Headers)
	out := Delivery{
		Message: inbox.Message{
			ID:      inbox.ID{Consumer: consumer, Message: d.MessageId},
			Payload: d.Body,
			TraceID: check.TraceID(headers["traceparent"]),
		},
		Topic:       firstOf(headers[HeaderTopic], d.RoutingKey),
		Exchange:    d.Exchange,
		Key:         headers[HeaderKey],
		ContentType: d.ContentType,
		Redelivered: d.Redelivered || headers[HeaderDeliveries] != "",
	}
	if exchange, moved := headers[HeaderExchange]; moved {
		out.Exchange = exchange
	}
	if headers[HeaderOutbox] != "" {
		out.Fingerprint = inbox.FingerprintOf(d.Body)
	}
	maps.DeleteFunc(headers, func(name, _ string) bool { return strings.HasPrefix(name, headerPrefix) })
	out.Headers = headers
	return out
}

func firstOf(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

func plainHeaders(table amqp.Table) map[string]string {
	headers := make(map[string]string, len(table))
	for name, value := range table {
		if text, plain := plainText(value); plain {
			headers[name] = text
		}
	}
	return headers
}

func plainText(value any) (string, bool) {
	switch v := value.(type) {
	case string:
		return v, true
	case []byte:
		return string(v), true
	case time.Time:
		return v.UTC().Format(time.RFC3339), true
	case bool, int8, uint8, int16, uint16, int32, uint32, int64, int, float32, float64:
		return fmt.Sprint(v), true
	default:
		return "", false
	}
}

// countMax bounds a count that a header claims, so that a sum of them does not overflow.
const countMax = 1 << 20

// deliveries counts the deliveries up to this one; 0 if nobody has counted. Quorum queues count in x-delivery-count,
// from 0; dead-lettering counts in x-death, by queue; the consumer counts in a header of its own, which holds if the
// message comes from its retry queue. What other queues have counted, or a publisher has put there, says nothing.
func (c *ConsumerConfig) deliveries(d amqp.Delivery) int {
	before, returned := deaths(d.Headers, c.Queue), deaths(d.Headers, c.RetryQueue)
	if own, known := whole(d.Headers[HeaderDeliveries]); known && returned > 0 {
		before = own
	} else {
		before = max(before, returned)
	}
	counted, quorum := whole(d.Headers["x-delivery-count"])
	if d.Redelivered && !quorum && before == 0 {
		return 0
	}
	return before + counted + 1
}

// deaths is how often the message was dead-lettered by a queue, at most countMax.
func deaths(headers amqp.Table, queue string) (sum int) {
	entries, _ := headers["x-death"].([]any)
	for _, entry := range entries {
		if death, ok := entry.(amqp.Table); ok && queue != "" && death["queue"] == queue {
			n, _ := whole(death["count"])
			sum = min(sum+n, countMax)
		}
	}
	return sum
}

func whole(value any) (n int, ok bool) {
	switch v := value.(type) {
	case int64:
		return int(min(max(v, 0), countMax)), true
	case int32:
		return int(min(max(v, 0), countMax)), true
	case int16:
		return max(int(v), 0), true
	case uint8:
		return int(v), true
	default:
		return 0, false
	}
}

// moved returns a copy of the message for the retry queue or the dead-letter queue. The broker's own history is left
// out: newer brokers do not go on with it, so it would be counted twice by one and not at all by the other. So is the
// list of further routing keys, which would send copies to everybody again.
func (d Delivery) moved(raw amqp.Delivery) amqp.Publishing {
	headers := maps.Clone(raw.Headers)
	if headers == nil {
		headers = amqp.Table{}
	}
	maps.DeleteFunc(headers, func(name string, _ any) bool {
		return strings.HasPrefix(name, "x-death") || strings.HasPrefix(name, "x-first-death-") || strings.HasPrefix(name, "x-last-death-") ||
			name == "x-delivery-count" || name == "CC" || name == HeaderReason || name == HeaderDeliveries
	})
	headers[HeaderTopic] = d.Topic
	headers[HeaderExchange] = d.Exchange
	return amqp.Publishing{
		Headers:         headers,
		ContentType:     raw.ContentType,
		ContentEncoding: raw.ContentEncoding,
		DeliveryMode:    amqp.Persistent,
		Priority:        raw.Priority,
		CorrelationId:   raw.CorrelationId,
		ReplyTo:         raw.ReplyTo,
		MessageId:       raw.MessageId,
		Timestamp:       raw.Timestamp,
		Type:            raw.Type,
		AppId:           raw.AppId,
		Body:            raw.Body,
	}
}

// bareHeaders is what the dead-letter queue gets of a message whose headers would not fit into a frame with ours: where
// it came from and why it is there, of which each is bounded by the protocol.
func bareHeaders(raw amqp.Delivery, reason string) amqp.Table {
	return amqp.Table{HeaderTopic: raw.RoutingKey, HeaderExchange: raw.Exchange, HeaderReason: reason}
}
