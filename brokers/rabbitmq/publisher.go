package rabbitmq

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/commitbox/commitbox/outbox"
)

const publishTimeoutDefault = 30 * time.Second

// PublisherConfig says where messages go. Only URL is required.
type PublisherConfig struct {
	// URL is the address of the broker, amqp:// or amqps://. It may carry heartbeat and TLS parameters.
	URL string

	// Alternates are the addresses of further nodes of the same cluster. They are tried in turn when a node does not
	// answer.
	Alternates []string

	// TLS is used for amqps addresses. Default: the system's certificates.
	TLS *tls.Config

	// Dial opens the transport connection. Default: a net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// Exchange is where messages go unless Route says otherwise. Default: the default exchange, for which the routing
	// key is the name of a queue.
	Exchange string

	// Route returns where a message goes. Default: to Exchange, with the topic as routing key.
	Route func(r outbox.Record) Route

	// Timeout bounds one Publish call whose context has no earlier deadline. Default 30 s.
	Timeout time.Duration

	// Logger hears of connections made. Default: slog.Default().
	Logger *slog.Logger
}

// Route is the way of a message through the broker.
type Route struct {
	Exchange string
	Key      string // at most 255 bytes

	// AllowUnroutable accepts that a message which no queue is bound for is dropped by the broker and counts as
	// delivered. It is meant for events that may have no subscriber.
	AllowUnroutable bool
}

// Publisher sends messages to RabbitMQ. It implements [outbox.Publisher]. It is safe for concurrent use.
//
// Its yes means: RabbitMQ has confirmed the message, and unless the route allows it otherwise at least one queue took
// it. For a durable classic queue that is a copy on one disk, for a quorum or mirrored queue a copy on several nodes.
//
// It uses one connection and a channel for each call that runs at the same time. The whole batch is sent before the
// first confirm is awaited. See the package documentation for how failures are told.
type Publisher struct {
	sender  *sender
	route   func(outbox.Record) Route
	timeout time.Duration
}

var _ outbox.Publisher = (*Publisher)(nil)

// NewPublisher checks the configuration. The connection is made by the first Publish.
func NewPublisher(cfg PublisherConfig) (*Publisher, error) {
	e, err := newEndpoint(cfg.URL, cfg.Alternates, cfg.TLS, cfg.Dial, "commitbox publisher")
	if cfg.Timeout < 0 {
		err = errors.Join(err, errors.New("rabbitmq: Timeout is negative"))
	}
	if err != nil {
		return nil, err
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = publishTimeoutDefault
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	if cfg.Route == nil {
		cfg.Route = func(r outbox.Record) Route { return Route{Exchange: cfg.Exchange, Key: r.Topic} }
	}
	return &Publisher{sender: newSender(e, cfg.Logger), route: cfg.Route, timeout: cfg.Timeout}, nil
}

// Publish implements [outbox.Publisher].
func (p *Publisher) Publish(ctx context.Context, batch []outbox.Record) []error {
	ctx, cancel := context.WithTimeoutCause(ctx, p.timeout, fmt.Errorf("no answer in %v: %w", p.timeout, context.DeadlineExceeded))
	defer cancel()
	errs := make([]error, len(batch))
	var good []outgoing
	var places []int
	for i, r := range batch {
		o := newOutgoing(r, p.route(r))
		if err := o.check(); err != nil {
			errs[i] = outbox.Permanent(err)
			continue
		}
		good, places = append(good, o), append(places, i)
	}
	if len(good) > 0 {
		for k, err := range p.sender.publish(ctx, good) {
			errs[places[k]] = err
		}
	}
	return errs
}

// Close waits for running Publish calls and closes the connection. When ctx ends before that, the calls are broken off
// and the socket is closed, and Close returns an error. Publish answers [ErrClosed] from the beginning of Close on.
// Further calls of Close do nothing.
func (p *Publisher) Close(ctx context.Context) error { return p.sender.close(ctx) }
