package rabbitmq_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/brokers/rabbitmq"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/rabbitctl"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

const (
	queue    = "orders"
	patience = 2 * time.Minute
)

// cluster is two nodes with a mirrored queue whose master is on the first one.
type cluster struct{ first, second *devserver.Server }

func newCluster(t *testing.T) cluster {
	t.Helper()
	c := cluster{first: testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{})}
	c.second = testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{Join: c.first})
	for _, node := range []*devserver.Server{c.first, c.second} {
		name := rabbitctl.Name(t, node)
		if status := rabbitctl.Run(t, c.first, "cluster_status"); !strings.Contains(status, name) {
			t.Fatalf("%s is not in the cluster:\n%s", name, status)
		}
	}
	rabbitctl.Run(t, c.first, "set_policy", "mirror", ".*", `{"ha-mode":"all","ha-sync-mode":"automatic"}`, "--apply-to", "queues")
	conn := dial(t, c.first)
	defer conn.Close()
	ch, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ch.QueueDeclare(queue, true, false, false, false, amqp.Table{"x-queue-master-locator": "client-local"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the mirror is in step", func() bool {
		return strings.Contains(rabbitctl.Run(t, c.first, "list_queues", "name", "synchronised_slave_pids"), "<")
	})
	return c
}

func dial(t *testing.T, node *devserver.Server) *amqp.Connection {
	t.Helper()
	conn, err := amqp.Dial(node.URL())
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func eventually(t *testing.T, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !done(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func messages(n int) []outbox.Record {
	all := make([]outbox.Record, n)
	for i := range all {
		all[i] = outbox.Record{
			Message:    outbox.Message{ID: uuid.New(), Topic: queue, Payload: fmt.Append(nil, i)},
			EnqueuedAt: time.Now(),
		}
	}
	return all
}

// publish sends each message until it is confirmed, as a relay does.
func publish(t *testing.T, p *rabbitmq.Publisher, batch []outbox.Record) {
	t.Helper()
	for deadline := time.Now().Add(patience); len(batch) > 0; time.Sleep(20 * time.Millisecond) {
		ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		errs := p.Publish(ctx, batch)
		cancel()
		var left []outbox.Record
		for i, err := range errs {
			if err != nil {
				left = append(left, batch[i])
			}
		}
		if len(left) > 0 && time.Now().After(deadline) {
			t.Fatalf("%d messages were never confirmed: %v", len(left), errs)
		}
		batch = left
	}
}

func openPublisher(t *testing.T, url string, alternates ...string) *rabbitmq.Publisher {
	t.Helper()
	p, err := rabbitmq.NewPublisher(rabbitmq.PublisherConfig{URL: url, Alternates: alternates})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := p.Close(ctx); err != nil {
			t.Error(err)
		}
	})
	return p
}

// store is a database with a table of effects that nothing keeps unique.
func store(t *testing.T) *pgxpool.Pool {
	t.Helper()
	pool := testenv.Database(t).Pool
	if _, err := pool.Exec(t.Context(), `CREATE TABLE effect (message text)`); err != nil {
		t.Fatal(err)
	}
	return pool
}

func write(ctx context.Context, tx pgx.Tx, d rabbitmq.Delivery) error {
	_, err := tx.Exec(ctx, `INSERT INTO effect (message) VALUES ($1)`, d.ID.Message)
	return err
}

func effects(t *testing.T, pool *pgxpool.Pool) (distinct, all int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT count(DISTINCT message), count(*) FROM effect`).Scan(&distinct, &all); err != nil {
		t.Fatal(err)
	}
	return distinct, all
}

func wantEffects(t *testing.T, pool *pgxpool.Pool, sent int) {
	t.Helper()
	if distinct, all := effects(t, pool); distinct != sent || all != sent {
		t.Errorf("%d messages sent, %d had an effect, %d effects", sent, distinct, all)
	}
}

// consume runs a consumer until the returned function stops it.
func consume(t *testing.T, pool *pgxpool.Pool, cfg rabbitmq.ConsumerConfig, handler func(context.Context, pgx.Tx, rabbitmq.Delivery) error) (stop func()) {
	t.Helper()
	box, err := inbox.New(pool, inbox.Config{})
	if err != nil {
		t.Fatal(err)
	}
	cfg.Queue, cfg.DeadLetterByBroker = queue, true
	c, err := rabbitmq.NewConsumer(box, cfg, handler)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return stop
}

// The node with the queue's master dies while messages are published and consumed; both sides go on at the other one.
func TestA9_Failover(t *testing.T) {
	c, pool := newCluster(t), store(t)
	p := openPublisher(t, c.first.URL(), c.second.URL())
	stop := consume(t, pool, rabbitmq.ConsumerConfig{URL: c.first.URL(), Alternates: []string{c.second.URL()}, HoldMax: time.Second}, write)
	batch := messages(1000)
	killed := make(chan error, 1)
	for i := 0; i < len(batch); i += 50 {
		if i == 500 {
			go func() { killed <- c.first.Kill() }()
		}
		publish(t, p, batch[i:i+50])
	}
	if err := <-killed; err != nil {
		t.Fatal(err)
	}
	eventually(t, "an effect of every message", func() bool { n, _ := effects(t, pool); return n == len(batch) })
	stop()
	wantEffects(t, pool, len(batch))
}

// The mirror becomes the master while a consumer at its node has unacknowledged deliveries: it delivers them again,
// while the first copies are still being handled.
func TestA9_MirroredQueueDeliversAgain(t *testing.T) {
	c, pool := newCluster(t), store(t)
	batch := messages(200)
	publish(t, openPublisher(t, c.second.URL()), batch)

	const workers = 8
	entered, gate := make(chan struct{}, 2*len(batch)), make(chan struct{})
	var mu sync.Mutex
	redelivered := 0
	cfg := rabbitmq.ConsumerConfig{
		URL: c.second.URL(), Workers: workers, HoldMax: time.Second,
		OnError: func(_ context.Context, d rabbitmq.Delivery, _ error) {
			if d.Redelivered {
				mu.Lock()
				defer mu.Unlock()
				redelivered++
			}
		},
	}
	stop := consume(t, pool, cfg, func(ctx context.Context, tx pgx.Tx, d rabbitmq.Delivery) error {
		if d.Redelivered {
			mu.Lock()
			redelivered++
			mu.Unlock()
		}
		entered <- struct{}{}
		<-gate
		return write(ctx, tx, d)
	})
	for range workers {
		<-entered
	}
	if err := c.first.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the mirror was promoted", func() bool {
		out := rabbitctl.Run(t, c.second, "list_queues", "name", "pid")
		return strings.Contains(out, rabbitctl.Name(t, c.second))
	})
	close(gate)
	eventually(t, "an effect of every message", func() bool { n, _ := effects(t, pool); return n == len(batch) })
	eventually(t, "an empty queue", func() bool {
		out := rabbitctl.Run(t, c.second, "list_queues", "name", "messages")
		return strings.Contains(out, queue+"\t0")
	})
	stop()
	wantEffects(t, pool, len(batch))
	mu.Lock()
	defer mu.Unlock()
	if redelivered == 0 {
		t.Error("the new master delivered nothing again: the test shows nothing")
	}
}
