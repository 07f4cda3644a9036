package main

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// The components beside the order service. A consumer's name is also the name of its queue and its inbox consumer.
const (
	relayName    = "relay"
	paymentsName = "payments"
	timelineName = "timeline"
)

// workers is how many deliveries a consumer handles at the same time.
const workers = 8

// queues says which topics each consumer gets.
var queues = map[string][]string{
	paymentsName: {ordersPlaced},
	timelineName: {ordersPlaced, ordersPaid},
}

// broker is what the components need of RabbitMQ or of its stand-in.
type broker interface {
	// publisher connects; the caller closes.
	publisher() (p outbox.Publisher, closePublisher func(), err error)

	// consume handles the deliveries of a queue until ctx ends.
	consume(ctx context.Context, box *inbox.Box, queue string, handle handler) error

	// waiting counts the deliveries that wait in queues.
	waiting(ctx context.Context) (int, error)
}

// component is one running part and what it works with.
type component struct {
	name   string
	pool   *pgxpool.Pool
	broker broker
	note   journal // told what happens
	log    *slog.Logger
}

// run works until ctx ends.
func (c component) run(ctx context.Context) error {
	switch c.name {
	case relayName:
		return c.relay(ctx)
	case paymentsName:
		return c.consume(ctx, pay)
	case timelineName:
		return c.consume(ctx, addToTimeline)
	default:
		return fmt.Errorf("unknown component %q", c.name)
	}
}

// The lease is short, so that the demonstration does not wait long for the work of the killed relay. Most of it is left to
// publishing and to a machine that is busy. The defaults suit production.
const (
	lease          = 3 * time.Second
	renew          = 400 * time.Millisecond
	renewTimeout   = 400 * time.Millisecond
	publishTimeout = 600 * time.Millisecond
	guard          = 700 * time.Millisecond
)

// batch is small, so that what a killed relay leaves behind is a part of the flow and not all of it.
const batch = 100

func (c component) relay(ctx context.Context) error {
	publisher, closePublisher, err := c.broker.publisher()
	if err != nil {
		return err
	}
	defer closePublisher()
	relay, err := outbox.NewRelay(c.pool, &duplicator{next: publisher, note: c.note}, outbox.RelayConfig{
		Lease: lease, Renew: renew, RenewTimeout: renewTimeout, PublishTimeout: publishTimeout, Guard: guard,
		Batch: batch, Logger: c.log,
	})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

func (c component) consume(ctx context.Context, handle handler) error {
	box, err := inbox.New(c.pool, inbox.Config{Observer: receipts(c.note), Logger: c.log})
	if err != nil {
		return err
	}
	return c.broker.consume(ctx, box, c.name, handle)
}

// receipts notes every message that the inbox saw and what it said.
type receipts journal

// Observe implements [commitbox.Observer].
func (note receipts) Observe(m *commitbox.Metric, _ float64, labels ...string) {
	if m == commitbox.InboxHandled {
		note(noteReceived(labels[0], labels[1]))
	}
}
