package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/brokers/rabbitmq"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// rabbit is RabbitMQ: a topic exchange of the given name, and queues whose names begin with it.
type rabbit struct {
	url, name string
}

func (r *rabbit) queue(name string) string { return r.name + "." + name }

const deadName = "dead"

func (r *rabbit) publisher() (outbox.Publisher, func(), error) {
	p, err := rabbitmq.NewPublisher(rabbitmq.PublisherConfig{URL: r.url, Exchange: r.name})
	if err != nil {
		return nil, nil, err
	}
	return p, func() { _ = p.Close(context.Background()) }, nil
}

func (r *rabbit) consume(ctx context.Context, box *inbox.Box, queue string, handle handler) error {
	consumer, err := rabbitmq.NewConsumer(box, rabbitmq.ConsumerConfig{
		URL: r.url, Queue: r.queue(queue), Name: queue, DeadLetterQueue: r.queue(deadName), Workers: workers,
	}, func(ctx context.Context, tx pgx.Tx, d rabbitmq.Delivery) error {
		return handle(ctx, tx, d.Message)
	})
	if err != nil {
		return err
	}
	return consumer.Run(ctx)
}

func (r *rabbit) waiting(context.Context) (n int, err error) {
	err = r.admin(func(ch *amqp.Channel) error {
		for name := range queues {
			q, err := ch.QueueDeclarePassive(r.queue(name), true, false, false, false, nil)
			if err != nil {
				return err
			}
			n += q.Messages
		}
		return nil
	})
	return n, err
}

// declare makes the exchange and the queues.
func (r *rabbit) declare() error {
	return r.admin(func(ch *amqp.Channel) error {
		if err := ch.ExchangeDeclare(r.name, amqp.ExchangeTopic, true, false, false, false, nil); err != nil {
			return err
		}
		if _, err := ch.QueueDeclare(r.queue(deadName), true, false, false, false, nil); err != nil {
			return err
		}
		for name, topics := range queues {
			if _, err := ch.QueueDeclare(r.queue(name), true, false, false, false, nil); err != nil {
				return err
			}
			for _, topic := range topics {
				if err := ch.QueueBind(r.queue(name), topic, r.name, false, nil); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// remove deletes what declare made.
func (r *rabbit) remove() error {
	return r.admin(func(ch *amqp.Channel) error {
		var errs []error
		for name := range queues {
			_, err := ch.QueueDelete(r.queue(name), false, false, false)
			errs = append(errs, err)
		}
		_, err := ch.QueueDelete(r.queue(deadName), false, false, false)
		return errors.Join(append(errs, err, ch.ExchangeDelete(r.name, false, false))...)
	})
}

func (r *rabbit) admin(do func(*amqp.Channel) error) error {
	conn, err := amqp.Dial(r.url)
	if err != nil {
		return fmt.Errorf("rabbitmq: %w", err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return fmt.Errorf("rabbitmq: %w", err)
	}
	return do(ch)
}
