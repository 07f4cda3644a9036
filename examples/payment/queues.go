package main

import (
	"encoding/json"
	"errors"
	"fmt"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/examples/payment/saga"
)

// The queues of a run, behind its name, which is also the exchange's.
const (
	queueOrders = ".orders"
	queueEvents = ".events" // what the saga tells the world
	queueDead   = ".dead"
)

// queues is the part of RabbitMQ that belongs to a run.
type queues struct {
	url, name string
}

func (q *queues) do(work func(*amqp.Channel) error) error {
	conn, err := amqp.Dial(q.url)
	if err != nil {
		return fmt.Errorf("rabbitmq: %w", err)
	}
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		return fmt.Errorf("rabbitmq: %w", err)
	}
	return work(ch)
}

func (q *queues) declare() error {
	return q.do(func(ch *amqp.Channel) error {
		err := ch.ExchangeDeclare(q.name, amqp.ExchangeTopic, true, false, false, false, nil)
		for _, suffix := range []string{queueOrders, queueEvents, queueDead} {
			if err == nil {
				_, err = ch.QueueDeclare(q.name+suffix, true, false, false, false, nil)
			}
		}
		if err == nil {
			err = ch.QueueBind(q.name+queueOrders, saga.TopicPlaced, q.name, false, nil)
		}
		for _, end := range []string{saga.Confirmed, saga.Refunded, saga.Declined, saga.Refused} {
			if err == nil {
				err = ch.QueueBind(q.name+queueEvents, "orders."+end, q.name, false, nil)
			}
		}
		return err
	})
}

func (q *queues) remove() error {
	return q.do(func(ch *amqp.Channel) error {
		errs := []error{ch.ExchangeDelete(q.name, false, false)}
		for _, suffix := range []string{queueOrders, queueEvents, queueDead} {
			_, err := ch.QueueDelete(q.name+suffix, false, false, false)
			errs = append(errs, err)
		}
		return errors.Join(errs...)
	})
}

// events reads what was told: for each order the ids of its messages, and the last end.
func (q *queues) events() (ids map[string]map[string]bool, ends map[string]string, err error) {
	ids, ends = map[string]map[string]bool{}, map[string]string{}
	err = q.do(func(ch *amqp.Channel) error {
		for {
			d, found, err := ch.Get(q.name+queueEvents, true)
			if err != nil || !found {
				return err
			}
			var end saga.Ended
			if err := json.Unmarshal(d.Body, &end); err != nil {
				return err
			}
			if ids[end.OrderID] == nil {
				ids[end.OrderID] = map[string]bool{}
			}
			ids[end.OrderID][d.MessageId] = true
			ends[end.OrderID] = end.Status
		}
	})
	return ids, ends, err
}
