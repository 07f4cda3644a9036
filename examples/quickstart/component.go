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

// runComponent runs one component until ctx ends and notes what happens in it.
func runComponent(ctx context.Context, name string, pool *pgxpool.Pool, b broker, note journal) error {
	switch name {
	case relayName:
		return runRelay(ctx, pool, b, note)
	case paymentsName:
		return runConsumer(ctx, name, pool, b, pay, note)
	case timelineName:
		return runConsumer(ctx, name, pool, b, addToTimeline, note)
	default:
		return fmt.Errorf("unknown component %q", name)
	}
}

// lease is short, so that the demonstration does not wait long for the work of the killed relay. The default suits
// production.
const lease = 3 * time.Second

// batch is small, so that what a killed relay leaves behind is a part of the flow and not all of it.
const batch = 100

func runRelay(ctx context.Context, pool *pgxpool.Pool, b broker, note journal) error {
	publisher, closePublisher, err := b.publisher()
	if err != nil {
		return err
	}
	defer closePublisher()
	relay, err := outbox.NewRelay(pool, &duplicator{next: publisher, note: note}, outbox.RelayConfig{
		Lease: lease, Batch: batch, Logger: slog.Default(),
	})
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

func runConsumer(ctx context.Context, name string, pool *pgxpool.Pool, b broker, handle handler, note journal) error {
	box, err := inbox.New(pool, inbox.Config{Observer: receipts(note)})
	if err != nil {
		return err
	}
	return b.consume(ctx, box, name, handle)
}

// receipts notes every message that the inbox saw and what it said.
type receipts journal

// Observe implements [commitbox.Observer].
func (note receipts) Observe(m *commitbox.Metric, _ float64, labels ...string) {
	if m == commitbox.InboxHandled {
		note(noteReceived(labels[0], labels[1]))
	}
}
