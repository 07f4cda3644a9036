package rabbitmq_test

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/brokers/rabbitmq"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

func ExamplePublisher() {
	relay := func(ctx context.Context, pool *pgxpool.Pool) error {
		publisher, err := rabbitmq.NewPublisher(rabbitmq.PublisherConfig{URL: "amqp://localhost/", Exchange: "shop"})
		if err != nil {
			return err
		}
		relay, err := outbox.NewRelay(pool, publisher, outbox.RelayConfig{})
		if err != nil {
			return err
		}
		err = relay.Run(ctx)
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		return errors.Join(err, publisher.Close(closing))
	}
	_ = relay // started by main
}

func ExampleConsumer() {
	payments := func(ctx context.Context, box *inbox.Box) error {
		consumer, err := rabbitmq.NewConsumer(box, rabbitmq.ConsumerConfig{
			URL:             "amqp://localhost/",
			Queue:           "payments",
			DeadLetterQueue: "payments.dead",
		}, func(ctx context.Context, tx pgx.Tx, d rabbitmq.Delivery) error {
			_, err := tx.Exec(ctx, `INSERT INTO payment (event, body) VALUES ($1, $2)`, d.ID.Message, d.Payload)
			return err
		})
		if err != nil {
			return err
		}
		return consumer.Run(ctx)
	}
	_ = payments // started by main
}
