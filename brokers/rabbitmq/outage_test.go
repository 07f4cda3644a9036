package rabbitmq

import (
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// behindProxy makes the shop's box reach its database through a proxy.
func (s *shop) behindProxy(cfg inbox.Config) *testenv.Proxy {
	s.t.Helper()
	url := s.pool.Config().ConnString()
	proxy := testenv.NewProxy(s.t, url)
	pool, err := pgxpool.New(s.t.Context(), proxy.URL(s.t, url))
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(pool.Close)
	s.box = s.newBox(pool, cfg)
	return proxy
}

// An outage of the database outlasts what MaxDeliveries and the broker's delivery limit would allow if it counted.
func TestOutageOfTheStoreUsesUpNoDeliveries(t *testing.T) {
	t.Parallel()
	for _, kind := range []string{"retry queue", "quorum"} {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			url, s := testenv.RabbitMQ(t), newShop(t)
			proxy := s.behindProxy(inbox.Config{MaxDeliveries: 2})
			b := dialBroker(t, url)
			dead := b.queue(nil)
			args := amqp.Table{}
			if kind == "quorum" {
				args = amqp.Table{"x-queue-type": "quorum", "x-delivery-limit": 2}
			}
			queue := b.queue(args)
			cfg := ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead, Workers: 2}
			if kind == "retry queue" {
				cfg.RetryQueue = b.retryQueue(queue)
			}
			proxy.Refuse(true)
			proxy.Cut()
			for _, id := range []string{"a", "b", "c"} {
				b.send(queue, amqp.Publishing{MessageId: id})
			}
			stop := s.consume(cfg, s.record)
			time.Sleep(5 * time.Second) // the outage
			if n := s.settlements(); len(n) != 0 {
				t.Errorf("settled during the outage: %v", n)
			}
			proxy.Refuse(false)
			eventually(t, "all settled", func() bool { n := s.settlements(); return n[settledAck]+n[settledDeadLetter] == 3 })
			mustStop(t, stop)
			if n := s.settlements(); s.effects() != 3 || n[settledRetry] != 0 {
				t.Errorf("%d of 3 messages were handled: %v", s.effects(), n)
			}
		})
	}
}

// A consumer that is stopped during an outage does not wait for its end.
func TestStopDuringAnOutageOfTheStore(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	proxy := s.behindProxy(inbox.Config{})
	b := dialBroker(t, url)
	queue := b.queue(nil)
	proxy.Refuse(true)
	for range 3 {
		b.send(queue, amqp.Publishing{MessageId: "m"})
	}
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, Workers: 2}, s.record)
	eventually(t, "deliveries are taken", func() bool { return b.depth(queue) == 0 })
	began := time.Now()
	mustStop(t, stop)
	if took := time.Since(began); took > patience/2 { // the time for draining is patience
		t.Errorf("stopping took %v", took)
	}
	if n := b.depth(queue); n != 3 {
		t.Errorf("%d of 3 messages are back", n)
	}
}

func TestNameThatTheInboxRefuses(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	for _, name := range []string{strings.Repeat("n", nameMax), strings.Repeat("n", nameMax+1), "n\x00", "\xff"} {
		_, err := NewConsumer(s.box, ConsumerConfig{URL: "amqp://127.0.0.1", Queue: "q", Name: name, DeadLetterByBroker: true}, s.record)
		_, _, refused := inbox.IsCompleted[inbox.Void](t.Context(), s.box, inbox.ID{Consumer: name, Message: "m"})
		if (err != nil) != (refused != nil) {
			t.Errorf("a name of %d bytes: NewConsumer says %v, the inbox %v", len(name), err, refused)
		}
	}
	_, err := NewConsumer(s.box, ConsumerConfig{URL: "amqp://127.0.0.1", Queue: strings.Repeat("q", nameMax+1), DeadLetterByBroker: true}, s.record)
	if err == nil || !strings.Contains(err.Error(), "Name") {
		t.Errorf("a queue that is too long for a name: %v", err)
	}
}
