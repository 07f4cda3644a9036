package rabbitmq

import (
	"errors"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Reasons why a message was not published. They are found in the errors of [Publisher.Publish] with errors.Is.
var (
	// ErrUnroutable: the exchange has no queue for the routing key, so the broker gave the message back.
	ErrUnroutable = errors.New("unroutable")
	// ErrRefused: the broker answered with a nack, for example because the queue is full and rejects publishes.
	ErrRefused = errors.New("refused by the broker")
	// ErrUnconfirmed: the answer did not arrive in time. The message may have been taken.
	ErrUnconfirmed = errors.New("not confirmed")
	// ErrBlocked: the broker takes no publishes because it is short of memory or disk.
	ErrBlocked = errors.New("blocked by the broker")
	// ErrTooLarge: the message does not fit what the broker or the protocol allows. Retrying is no use.
	ErrTooLarge = errors.New("too large")
	// ErrClosed: the publisher was closed.
	ErrClosed = errors.New("rabbitmq: closed")
)

// PublishError says which message was not published, and why.
type PublishError struct {
	MessageID  string
	Exchange   string
	RoutingKey string
	Err        error
}

func (e *PublishError) Error() string {
	return fmt.Sprintf("rabbitmq: message %s to exchange %q with routing key %q: %v", e.MessageID, e.Exchange, e.RoutingKey, e.Err)
}

func (e *PublishError) Unwrap() error { return e.Err }

var errConnectionLost = errors.New("connection lost")

// exception is the broker's complaint about something that it was sent, with which it closes the channel or the whole
// connection.
type exception struct {
	code       int
	reason     string
	connection bool
}

func (e *exception) Error() string {
	hint := ""
	if e.code == amqp.NotFound {
		hint = "; declare the exchange"
	}
	return fmt.Sprintf("the broker closed the %s: %s (%d)%s", e.scope(), e.reason, e.code, hint)
}

func (e *exception) scope() string {
	if e.connection {
		return "connection"
	}
	return "channel"
}

// aboutMessage tells that the complaint is about what is in one message, such as its size, and so will come again.
func (e *exception) aboutMessage() bool {
	return !e.connection && (e.code == amqp.PreconditionFailed || e.code == amqp.ContentTooLarge)
}

// aboutExchange tells that the complaint hits every message to that exchange.
func (e *exception) aboutExchange() bool { return !e.connection && e.code == amqp.NotFound }
