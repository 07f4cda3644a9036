package rabbitmq

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/inboxtest"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
	"github.com/commitbox/commitbox/outboxtest"
)

// The two ways in which RabbitMQ says no: it returns what no queue is bound for, and nacks what a full queue rejects.
const (
	unroutable = "nowhere"
	full       = "full"
)

func TestPublisherContract(t *testing.T) {
	t.Parallel()
	for _, refusal := range []string{unroutable, full} {
		t.Run(refusal, func(t *testing.T) {
			t.Parallel()
			outboxtest.TestPublisher(t, func(t *testing.T) outboxtest.Subject { return publisherSubject(t, refusal) })
		})
	}
}

// publisherSubject is a publisher that reaches the broker through a proxy, and whose refused messages are routed to
// where the broker refuses them. Everything else goes to one queue.
func publisherSubject(t *testing.T, refusal string) outboxtest.Subject {
	t.Helper()
	url := testenv.RabbitMQ(t)
	b, proxy := dialBroker(t, url), testenv.NewProxy(t, url)
	exchange, queue := b.exchange(), b.queue(nil)
	b.bind(queue, "outboxtest.topic", exchange)
	b.bind(b.fullQueue(), full, exchange)
	var refused atomic.Pointer[func(outbox.Record) bool]
	p := openPublisher(t, PublisherConfig{URL: proxy.URL(t, url), Route: func(r outbox.Record) Route {
		if isRefused := refused.Load(); isRefused != nil && (*isRefused)(r) {
			return Route{Exchange: exchange, Key: refusal}
		}
		return Route{Exchange: exchange, Key: r.Topic}
	}})
	var mu sync.Mutex
	var held []outbox.Record
	return outboxtest.Subject{
		Publisher: p,
		Timeout:   patience,
		Received: func() []outbox.Record {
			mu.Lock()
			defer mu.Unlock()
			for _, d := range b.drain(queue) {
				held = append(held, receivedRecord(t, d))
			}
			return slices.Clone(held)
		},
		Refuse: func(isRefused func(outbox.Record) bool) { refused.Store(&isRefused) },
		Away: func(away bool) {
			proxy.Refuse(away)
			if away {
				proxy.Cut()
			}
		},
		Silent: func(silent bool) {
			if silent {
				proxy.BlackHole(testenv.ToServer)
				proxy.BlackHole(testenv.ToClient)
			} else {
				proxy.Heal()
			}
		},
	}
}

// fullQueue declares a queue that rejects whatever is published to it.
func (b *broker) fullQueue() string {
	b.t.Helper()
	queue := b.queue(amqp.Table{"x-max-length": 1, "x-overflow": "reject-publish"})
	if err := b.ch.PublishWithContext(b.t.Context(), "", queue, false, false, amqp.Publishing{}); err != nil {
		b.t.Fatal(err)
	}
	eventually(b.t, "the queue is full", func() bool { return b.depth(queue) == 1 })
	return queue
}

func receivedRecord(t *testing.T, raw amqp.Delivery) outbox.Record {
	t.Helper()
	id, err := uuid.Parse(raw.MessageId)
	if err != nil {
		t.Error(err)
	}
	d := newDelivery("", raw)
	return outbox.Record{Message: outbox.Message{
		ID: id, Topic: d.Topic, Key: d.Key, ContentType: d.ContentType, Headers: d.Headers, Payload: d.Payload,
	}}
}

func TestConsumerContract(t *testing.T) {
	t.Parallel()
	for name, withRetryQueue := range map[string]bool{"held": false, "retry queue": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inboxtest.TestConsumer(t, func(t *testing.T, handler inboxtest.Handler) inboxtest.Consumer {
				return openConsumer(t, withRetryQueue, handler)
			})
		})
	}
}

// contractConsumer implements [inboxtest.Consumer].
type contractConsumer struct {
	*broker
	shop        *shop
	queue, dead string

	mu   sync.Mutex
	sent int
	ids  []string // of the dead letters
}

// openConsumer starts a consumer. When it is stopped its queue must be empty: what it did not acknowledge is back.
func openConsumer(t *testing.T, withRetryQueue bool, handler inboxtest.Handler) *contractConsumer {
	t.Helper()
	url, s := testenv.RabbitMQ(t), newShop(t)
	s.box = s.newBox(s.pool, inbox.Config{BackoffBase: 10 * time.Millisecond, BackoffMax: 20 * time.Millisecond})
	b := dialBroker(t, url)
	c := &contractConsumer{broker: b, shop: s, queue: b.queue(nil), dead: b.queue(nil)}
	cfg := ConsumerConfig{URL: url, Queue: c.queue, DeadLetterQueue: c.dead, HoldMax: 100 * time.Millisecond}
	if withRetryQueue {
		cfg.RetryQueue = b.retryQueue(c.queue)
	}
	stop := s.consume(cfg, func(ctx context.Context, tx pgx.Tx, d Delivery) error { return handler(ctx, tx, d.Message) })
	t.Cleanup(func() {
		mustStop(t, stop)
		if n := b.depth(c.queue); n != 0 && !t.Failed() {
			t.Errorf("%d deliveries were called settled and are back in the queue", n)
		}
	})
	return c
}

// Deliver implements [inboxtest.Consumer].
func (c *contractConsumer) Deliver(ctx context.Context, id string, payload []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sent++
	return c.ch.PublishWithContext(ctx, "", c.queue, false, false, amqp.Publishing{MessageId: id, Body: payload})
}

// Backlog implements [inboxtest.Consumer]. The broker does not tell how many deliveries are in hand, so it counts those
// that the consumer has settled for good.
func (c *contractConsumer) Backlog(context.Context) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	settled := c.shop.settlements()
	return c.sent - settled[settledAck] - settled[settledDeadLetter] - settled[settledMissingID], nil
}

// DeadLetters implements [inboxtest.Consumer].
func (c *contractConsumer) DeadLetters(context.Context) ([]string, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, d := range c.drain(c.dead) {
		c.ids = append(c.ids, d.MessageId)
	}
	return c.ids, nil
}
