package rabbitmq

import (
	"context"
	"maps"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

func TestConsumeMapsTheMessage(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	exchange, queue := b.exchange(), b.queue(nil)
	b.bind(queue, "orders.#", exchange)
	r := record("orders.paid", "payload")
	r.Key, r.ContentType = "order-1", "text/plain"
	r.Headers = map[string]string{"traceparent": "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"}
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url, Exchange: exchange}), r)
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, Name: "shop.paid"}, s.record)
	eventually(t, "one settlement", func() bool { return s.settlements()[settledAck] == 1 })
	mustStop(t, stop)
	s.wantEffects([]outbox.Record{r})

	d := s.deliveries()[0]
	if d.ID != (inbox.ID{Consumer: "shop.paid", Message: r.ID.String()}) || string(d.Payload) != "payload" || d.Delivery != 1 || d.Redelivered {
		t.Errorf("message: %+v", d)
	}
	if d.Topic != "orders.paid" || d.Exchange != exchange || d.Key != "order-1" || d.ContentType != "text/plain" {
		t.Errorf("way: %+v", d)
	}
	if d.TraceID != "0123456789abcdef0123456789abcdef" || !maps.Equal(d.Headers, r.Headers) {
		t.Errorf("trace %q, headers %v", d.TraceID, d.Headers)
	}
	if string(d.Fingerprint) != string(inbox.FingerprintOf(r.Payload)) {
		t.Error("a message of our outbox has no fingerprint")
	}
}

func TestA9_ProducerRetry(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	p := openPublisher(t, PublisherConfig{URL: url})
	batch := records(queue, 50)
	for range 3 {
		mustPublish(t, p, batch...)
	}
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue}, s.record)
	eventually(t, "all copies acknowledged", func() bool { return s.settlements()[settledAck] == 150 })
	mustStop(t, stop)
	s.wantEffects(batch)
	if n := b.depth(queue); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

// ackRule counts the client's acknowledgements and gives the n-th one its fate.
func ackRule(n int64, f fate) func(method) fate {
	var seen atomic.Int64
	return func(m method) fate {
		if m == clientAck && seen.Add(1) == n {
			return f
		}
		return pass
	}
}

func TestB40_CutBetweenCommitAndAck(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	b := dialBroker(t, testenv.RabbitMQ(t))
	proxy := newProxy(t, testenv.RabbitMQ(t))
	queue := b.queue(nil)
	r := record(queue, "x")
	mustPublish(t, openPublisher(t, PublisherConfig{URL: testenv.RabbitMQ(t)}), r)
	proxy.set(ackRule(1, cut))
	stop := s.consume(ConsumerConfig{URL: proxy.url, Queue: queue}, s.record)
	eventually(t, "the second copy acknowledged", func() bool { return s.effects() == 1 && b.depth(queue) == 0 && s.settlements()[settledAck] == 2 })
	mustStop(t, stop)
	s.wantEffects([]outbox.Record{r})
	if n := len(s.deliveries()); n != 1 {
		t.Errorf("the handler ran %d times", n)
	}
	if n := b.depth(queue); n != 0 {
		t.Errorf("%d messages came back after the stop", n)
	}
}

func TestA9_LostAck(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	b := dialBroker(t, testenv.RabbitMQ(t))
	proxy := newProxy(t, testenv.RabbitMQ(t))
	queue := b.queue(nil)
	batch := records(queue, 20)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: testenv.RabbitMQ(t)}), batch...)
	proxy.set(func(m method) fate {
		if m == clientAck {
			return drop
		}
		return pass
	})
	stop := s.consume(ConsumerConfig{URL: proxy.url, Queue: queue}, s.record)
	eventually(t, "all handled", func() bool { return s.settlements()[settledAck] == len(batch) })
	proxy.set(nil)
	proxy.cut()
	eventually(t, "all handled again", func() bool { return s.settlements()[settledAck] == 2*len(batch) })
	mustStop(t, stop)
	s.wantEffects(batch)
	if n := b.depth(queue); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

// A consumer that breaks down has prefetched messages it never looked at; they come again, marked as redelivered.
func TestA9_PrefetchRedelivery(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	b := dialBroker(t, testenv.RabbitMQ(t))
	proxy := newProxy(t, testenv.RabbitMQ(t))
	queue := b.queue(nil)
	batch := records(queue, 40)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: testenv.RabbitMQ(t)}), batch...)
	entered, gate := make(chan struct{}, 100), make(chan struct{})
	stop := s.consume(ConsumerConfig{URL: proxy.url, Queue: queue, Workers: 2, Prefetch: 30}, func(ctx context.Context, tx pgx.Tx, d Delivery) error {
		entered <- struct{}{}
		<-gate
		return s.record(ctx, tx, d)
	})
	<-entered
	<-entered
	proxy.cut()
	close(gate)
	eventually(t, "all effects", func() bool { return s.effects() == len(batch) })
	s.finish(b, proxy.url, queue, stop)
	s.wantEffects(batch)
	redelivered := false
	for _, d := range s.deliveries() {
		redelivered = redelivered || d.Redelivered
	}
	if !redelivered {
		t.Error("nothing was marked as redelivered")
	}
}

func TestB40_StopInTheLastMomentOfAHandler(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	batch := records(queue, 30)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), batch...)
	entered := make(chan struct{}, len(batch))
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, Workers: 3}, func(ctx context.Context, tx pgx.Tx, d Delivery) error {
		entered <- struct{}{}
		time.Sleep(100 * time.Millisecond)
		if ctx.Err() != nil {
			t.Error("the handler was cancelled before the drain timeout")
		}
		return s.record(ctx, tx, d)
	})
	<-entered
	mustStop(t, stop)
	handled := s.effects()
	if left := b.depth(queue); handled == 0 || handled+left != len(batch) {
		t.Errorf("%d handled, %d in the queue, %d sent", handled, left, len(batch))
	}
	stop = s.consume(ConsumerConfig{URL: url, Queue: queue}, s.record)
	eventually(t, "all effects", func() bool { return s.effects() == len(batch) })
	mustStop(t, stop)
	s.wantEffects(batch)
	if n := len(s.deliveries()); n != len(batch) {
		t.Errorf("the handler ran %d times for %d messages", n, len(batch))
	}
}

func TestStopWithAHandlerThatDoesNotEnd(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), record(queue, ""))
	entered, release, left := make(chan struct{}), make(chan struct{}), make(chan struct{})
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DrainTimeout: 50 * time.Millisecond}, func(ctx context.Context, _ pgx.Tx, _ Delivery) error {
		defer close(left)
		close(entered)
		<-release
		return ctx.Err()
	})
	<-entered
	if err := stop(); err == nil || !strings.Contains(err.Error(), "1 handlers still running") {
		t.Errorf("Run: %v", err)
	}
	eventually(t, "the message is back", func() bool { return b.depth(queue) == 1 })
	close(release)
	<-left
	eventually(t, "the late settlement", func() bool { return s.settlements()[settledError]+s.settlements()[settledRetry] == 1 })
}

// While the database is away nothing is acknowledged and nothing is given up.
func TestConsumeWhileTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	batch := records(queue, 10)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), batch...)

	proxy := testenv.NewProxy(t, s.pool.Config().ConnString())
	config, err := pgxpool.ParseConfig(proxy.URL(t, s.pool.Config().ConnString()))
	if err != nil {
		t.Fatal(err)
	}
	var tries atomic.Int64
	config.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
		tries.Add(1)
		return nil
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	s.box = s.newBox(pool, inbox.Config{MaxAttempts: 1})
	proxy.Refuse(true)
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, HoldMax: 100 * time.Millisecond}, s.record)
	eventually(t, "many tries", func() bool { return tries.Load() >= 3*int64(len(batch)) })
	if n := s.settlements(); len(n) != 0 {
		t.Errorf("settled without a database: %v", n)
	}
	proxy.Refuse(false)
	eventually(t, "all effects", func() bool { return s.settlements()[settledAck] == len(batch) })
	mustStop(t, stop)
	s.wantEffects(batch)
}

func TestHandlerThatPanicsOrExits(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	batch := records(queue, 12)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), batch...)
	var calls atomic.Int64
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, Workers: 2, HoldMax: 100 * time.Millisecond}, func(ctx context.Context, tx pgx.Tx, d Delivery) error {
		switch n := calls.Add(1); {
		case n <= 3:
			panic("no")
		case n <= 6:
			runtime.Goexit()
		}
		return s.record(ctx, tx, d)
	})
	eventually(t, "all effects", func() bool { return s.settlements()[settledAck] == len(batch) })
	mustStop(t, stop)
	s.wantEffects(batch)
	if n := b.depth(queue); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

func TestNewConsumerRefusesBadConfig(t *testing.T) {
	t.Parallel()
	_, err := NewConsumer(nil, ConsumerConfig{URL: "x", Workers: -1, DrainTimeout: -1}, nil)
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"URL", "Queue is empty", "Workers", "DrainTimeout", "DeadLetterQueue", "box", "handler"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
}

func TestConsumerRunsOnceAtATime(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	c, err := NewConsumer(s.box, ConsumerConfig{URL: url, Queue: "no-such-queue", DeadLetterByBroker: true}, s.record)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	eventually(t, "it runs", c.running.Load)
	if err := c.Run(ctx); err == nil {
		t.Error("a second Run was let in")
	}
	cancel()
	if err := <-done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

// A queue that is declared later is found.
func TestConsumerWaitsForItsQueue(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	if _, err := b.ch.QueueDelete(queue, false, false, false); err != nil {
		t.Fatal(err)
	}
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue}, s.record)
	time.Sleep(200 * time.Millisecond)
	if _, err := b.ch.QueueDeclare(queue, true, false, false, false, amqp.Table{}); err != nil {
		t.Fatal(err)
	}
	r := record(queue, "")
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), r)
	eventually(t, "the effect", func() bool { return s.effects() == 1 })
	if _, err := b.ch.QueueDelete(queue, false, false, false); err != nil {
		t.Fatal(err)
	}
	if _, err := b.ch.QueueDeclare(queue, true, false, false, false, amqp.Table{}); err != nil {
		t.Fatal(err)
	}
	r2 := record(queue, "after the queue was deleted")
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), r2)
	eventually(t, "the second effect", func() bool { return s.effects() == 2 })
	mustStop(t, stop)
}
