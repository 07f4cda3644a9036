package rabbitmq

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/rabbitctl"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// enqueue stores n messages and returns them with their ids.
func enqueue(t testing.TB, pool *pgxpool.Pool, topic string, n int, payload []byte) []outbox.Record {
	t.Helper()
	messages := make([]outbox.Message, n)
	for i := range messages {
		messages[i] = outbox.Message{Topic: topic, Payload: payload}
	}
	all := make([]outbox.Record, n)
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		ids, err := outbox.Enqueue(t.Context(), tx, messages...)
		for i, id := range ids {
			all[i] = outbox.Record{Message: messages[i]}
			all[i].ID = id
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// runRelay runs a relay until the returned function or the end of the test stops it.
func runRelay(t testing.TB, pool *pgxpool.Pool, p *Publisher) (stop func()) {
	t.Helper()
	relay, err := outbox.NewRelay(pool, p, outbox.RelayConfig{BackoffBase: 20 * time.Millisecond, BackoffMax: 200 * time.Millisecond, MaxAttempts: 1000})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- relay.Run(ctx) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("relay: %v", err)
			}
		case <-time.After(patience):
			t.Error("the relay does not stop")
		}
	}
	t.Cleanup(stop)
	return stop
}

// undelivered counts the messages that are not confirmed.
func undelivered(t testing.TB, pool *pgxpool.Pool) (n int) {
	t.Helper()
	const sql = `SELECT (SELECT count(*) FROM commitbox.outbox_message) + (SELECT count(*) FROM commitbox.outbox_deferred)`
	if err := pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestB26_RelayKeepsUnroutable(t *testing.T) {
	t.Parallel()
	url, pool := testenv.RabbitMQ(t), testenv.Database(t).Pool
	b := dialBroker(t, url)
	exchange, queue := b.exchange(), b.queue(nil)
	sent := enqueue(t, pool, "topic", 1, nil)
	stop := runRelay(t, pool, openPublisher(t, PublisherConfig{URL: url, Exchange: exchange}))
	var reason string
	eventually(t, "a recorded failure", func() bool {
		err := pool.QueryRow(t.Context(), `SELECT last_error FROM commitbox.outbox_deferred WHERE attempts > 0`).Scan(&reason)
		return err == nil
	})
	if !strings.Contains(reason, "unroutable") {
		t.Errorf("reason: %s", reason)
	}
	b.bind(queue, "topic", exchange)
	eventually(t, "delivered", func() bool { return undelivered(t, pool) == 0 })
	stop()
	wantIDs(t, b.drain(queue), sent)
}

func TestB25_RelaySurvivesABrokerRestart(t *testing.T) {
	t.Parallel()
	pool := testenv.Database(t).Pool
	node := testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{})
	queue := queueOnDisk(t, node)
	stop := runRelay(t, pool, openPublisher(t, PublisherConfig{URL: node.URL()}))
	sent := enqueue(t, pool, queue, 500, []byte("before"))
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	sent = append(sent, enqueue(t, pool, queue, 500, []byte("while it is down"))...)
	if err := node.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	sent = append(sent, enqueue(t, pool, queue, 500, []byte("after"))...)
	eventually(t, "delivered", func() bool { return undelivered(t, pool) == 0 })
	stop()
	wantIDs(t, dialBroker(t, node.URL()).drain(queue), sent)
}

func TestB27_RelayStopsDuringAnAlarm(t *testing.T) {
	t.Parallel()
	pool := testenv.Database(t).Pool
	node := testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{})
	b := dialBroker(t, node.URL())
	queue := b.queue(nil)
	rabbitctl.Run(t, node, "set_vm_memory_high_watermark", "0.0001")
	p := openPublisher(t, PublisherConfig{URL: node.URL()})
	stop := runRelay(t, pool, p)
	sent := enqueue(t, pool, queue, 20, make([]byte, 1<<20))
	eventually(t, "the alarm is noticed", p.isBlocked)
	stop()
	if n := undelivered(t, pool); n != len(sent) {
		t.Errorf("%d of %d messages are left", n, len(sent))
	}
	rabbitctl.Run(t, node, "set_vm_memory_high_watermark", "0.4")
	stop = runRelay(t, pool, p)
	eventually(t, "delivered", func() bool { return undelivered(t, pool) == 0 })
	stop()
	wantIDs(t, b.drain(queue), sent)
}
