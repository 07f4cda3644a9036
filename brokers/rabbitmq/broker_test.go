package rabbitmq

import (
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/rabbitctl"
	"github.com/commitbox/commitbox/outbox"
)

// patience bounds every wait of a test for something that has to happen.
const patience = 60 * time.Second

// broker is a test's own connection to RabbitMQ, beside the code under test.
type broker struct {
	t    testing.TB
	conn *amqp.Connection
	ch   *amqp.Channel
}

func dialBroker(t testing.TB, url string) *broker {
	t.Helper()
	conn, err := amqp.Dial(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return &broker{t: t, conn: conn, ch: ch}
}

// queue declares a durable queue with a name of its own, deleted at the end of the test.
func (b *broker) queue(args amqp.Table) string {
	b.t.Helper()
	name := "test-" + rand.Text()
	if _, err := b.ch.QueueDeclare(name, true, false, false, false, args); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { b.ch.QueueDelete(name, false, false, false) })
	return name
}

// queueOnDisk declares a durable queue that survives the killing of its node. The broker answers a declaration before
// it has written it.
func queueOnDisk(t testing.TB, node *devserver.Server) string {
	t.Helper()
	b := dialBroker(t, node.URL())
	name := "test-" + rand.Text()
	if _, err := b.ch.QueueDeclare(name, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	rabbitctl.Run(t, node, "eval", "ok = mnesia:sync_log(), dumped = mnesia:dump_log().")
	return name
}

// exchange declares a topic exchange with a name of its own.
func (b *broker) exchange() string {
	b.t.Helper()
	name := "test-" + rand.Text()
	if err := b.ch.ExchangeDeclare(name, "topic", true, false, false, false, nil); err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { b.ch.ExchangeDelete(name, false, false) })
	return name
}

func (b *broker) bind(queue, key, exchange string) {
	b.t.Helper()
	if err := b.ch.QueueBind(queue, key, exchange, false, nil); err != nil {
		b.t.Fatal(err)
	}
}

// depth is the number of messages that wait in a queue.
func (b *broker) depth(queue string) int {
	b.t.Helper()
	q, err := b.ch.QueueDeclarePassive(queue, true, false, false, false, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	return q.Messages
}

// drain takes all messages out of a queue.
func (b *broker) drain(queue string) (all []amqp.Delivery) {
	b.t.Helper()
	for {
		d, ok, err := b.ch.Get(queue, true)
		if err != nil {
			b.t.Fatal(err)
		}
		if !ok {
			return all
		}
		all = append(all, d)
	}
}

// ids counts the copies of each message.
func ids(deliveries []amqp.Delivery) map[string]int {
	n := map[string]int{}
	for _, d := range deliveries {
		n[d.MessageId]++
	}
	return n
}

func record(topic, payload string) outbox.Record {
	return outbox.Record{Message: outbox.Message{ID: uuid.New(), Topic: topic, Payload: []byte(payload)}, EnqueuedAt: time.Now()}
}

func records(topic string, n int) []outbox.Record {
	all := make([]outbox.Record, n)
	for i := range all {
		all[i] = record(topic, fmt.Sprint(i))
	}
	return all
}

func openPublisher(t testing.TB, cfg PublisherConfig) *Publisher {
	t.Helper()
	p, err := NewPublisher(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		_ = p.Close(ctx) // tests that close themselves look at the error
	})
	return p
}

func publish(t testing.TB, p *Publisher, timeout time.Duration, batch ...outbox.Record) []error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	errs := p.Publish(ctx, batch)
	if len(errs) != len(batch) {
		t.Fatalf("%d answers for %d messages", len(errs), len(batch))
	}
	return errs
}

func mustPublish(t testing.TB, p *Publisher, batch ...outbox.Record) {
	t.Helper()
	for i, err := range publish(t, p, patience, batch...) {
		if err != nil {
			t.Fatalf("message %d: %v", i, err)
		}
	}
}

// publishUntilDone sends the messages again until each one is confirmed, as a relay does.
func publishUntilDone(t testing.TB, p *Publisher, timeout time.Duration, batch []outbox.Record) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for len(batch) > 0 {
		var left []outbox.Record
		errs := publish(t, p, timeout, batch...)
		for i, err := range errs {
			if err != nil {
				left = append(left, batch[i])
			}
		}
		if batch = left; len(left) > 0 {
			if time.Now().After(deadline) {
				t.Fatalf("%d messages were never confirmed: %v", len(left), errs)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
}

// wantIDs checks that a queue held each message at least once and nothing else.
func wantIDs(t testing.TB, got []amqp.Delivery, sent []outbox.Record) {
	t.Helper()
	copies := ids(got)
	for _, r := range sent {
		if copies[r.ID.String()] == 0 {
			t.Errorf("message %s is not in the queue", r.ID)
		}
		delete(copies, r.ID.String())
	}
	if len(copies) > 0 {
		t.Errorf("messages that nobody sent: %v", slices.Collect(maps.Keys(copies)))
	}
}

func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}
