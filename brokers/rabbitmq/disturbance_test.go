package rabbitmq

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// The network goes silent while a handler runs: the broker gives the message to another consumer, which hears that it
// is in progress, and later that it is done.
func TestA9_Partition(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	r := record(queue, "x")
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), r)

	proxy := testenv.NewProxy(t, url)
	entered, gate := make(chan struct{}), make(chan struct{})
	cutOff := &shop{t: t, pool: s.pool, box: s.box, settled: map[string]int{}}
	stopCutOff := cutOff.consume(ConsumerConfig{URL: proxy.URL(t, url) + "?heartbeat=1", Queue: queue}, func(ctx context.Context, tx pgx.Tx, d Delivery) error {
		close(entered)
		<-gate
		return cutOff.record(ctx, tx, d)
	})
	<-entered
	proxy.BlackHole(testenv.ToServer)
	proxy.BlackHole(testenv.ToClient)
	stopOther := s.consume(ConsumerConfig{URL: url, Queue: queue, HoldMax: 100 * time.Millisecond}, s.record)
	eventually(t, "the message is in progress elsewhere", func() bool { return s.settlements()[settledRetry] > 0 })
	close(gate)
	eventually(t, "an ack of the other consumer", func() bool { return s.settlements()[settledAck] == 1 })
	proxy.Heal()
	mustStop(t, stopOther)
	mustStop(t, stopCutOff)
	s.wantEffects([]outbox.Record{r})
	if n := b.depth(queue); n != 0 || len(s.deliveries()) != 0 {
		t.Errorf("%d messages are left, the other consumer's handler ran %d times", n, len(s.deliveries()))
	}
}

func TestConcurrentCopies(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	batch := records(queue, 10)
	p := openPublisher(t, PublisherConfig{URL: url})
	for _, r := range batch {
		mustPublish(t, p, r, r)
	}
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, HoldMax: 50 * time.Millisecond}, func(ctx context.Context, tx pgx.Tx, d Delivery) error {
		time.Sleep(20 * time.Millisecond)
		return s.record(ctx, tx, d)
	})
	eventually(t, "all copies acknowledged", func() bool { return s.settlements()[settledAck] == 2*len(batch) })
	mustStop(t, stop)
	s.wantEffects(batch)
}

// A silent network: the call comes back in time, and the next one gets a new connection.
func TestB25_SilentNetwork(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	proxy := testenv.NewProxy(t, url)
	p := openPublisher(t, PublisherConfig{URL: proxy.URL(t, url)})
	mustPublish(t, p, record(queue, "first"))
	b.drain(queue)
	proxy.BlackHole(testenv.ToServer)
	proxy.BlackHole(testenv.ToClient)
	batch := records(queue, 100)
	start := time.Now()
	for i, err := range publish(t, p, 300*time.Millisecond, batch...) {
		if err == nil {
			t.Errorf("message %d counts as delivered", i)
		}
	}
	if took := time.Since(start); took > patience {
		t.Errorf("the call came back after %v", took)
	}
	proxy.Cut()
	proxy.Heal()
	publishUntilDone(t, p, patience, batch)
	wantIDs(t, b.drain(queue), batch)
}

func TestBrokerRestartWhilePublishingAndConsuming(t *testing.T) {
	t.Parallel()
	node, s := testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{}), newShop(t)
	queue := queueOnDisk(t, node)
	p := openPublisher(t, PublisherConfig{URL: node.URL()})
	stop := s.consume(ConsumerConfig{URL: node.URL(), Queue: queue}, s.record)
	batch := records(queue, 600)
	for i := 0; i < len(batch); i += 50 {
		if i == 300 {
			if err := node.Kill(); err != nil {
				t.Fatal(err)
			}
			if err := node.Restart(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		publishUntilDone(t, p, 5*time.Second, batch[i:i+50])
	}
	eventually(t, "all effects", func() bool { return s.effects() == len(batch) })
	s.finish(dialBroker(t, node.URL()), node.URL(), queue, stop)
	s.wantEffects(batch)
}
