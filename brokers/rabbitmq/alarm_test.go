package rabbitmq

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/rabbitctl"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// isBlocked tells whether the broker has said that it takes no publishes.
func (p *Publisher) isBlocked() bool {
	p.sender.turn <- struct{}{}
	l := p.sender.link
	<-p.sender.turn
	return l != nil && l.blockedError() != nil
}

func TestB27_BlockedByAnAlarm(t *testing.T) {
	t.Parallel()
	node := testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{})
	b := dialBroker(t, node.URL())
	queue := b.queue(nil)
	p := openPublisher(t, PublisherConfig{URL: node.URL()})
	mustPublish(t, p, record(queue, "before the alarm"))
	b.drain(queue)

	rabbitctl.Run(t, node, "set_vm_memory_high_watermark", "0.0001")
	large := make([]outbox.Record, 8)
	for i := range large {
		large[i] = record(queue, strings.Repeat("x", 4<<20)) // more than the socket buffers hold: the write hangs
	}
	start := time.Now()
	for i, err := range publish(t, p, 10*time.Second, large...) {
		if !errors.Is(err, ErrBlocked) || kind(err) != "unavailable" {
			t.Errorf("message %d: %v", i, err)
		}
	}
	if err := publish(t, p, patience, large[0])[0]; !errors.Is(err, ErrBlocked) {
		t.Errorf("while blocked: %v", err)
	}
	if took := time.Since(start); took > patience {
		t.Errorf("the calls came back after %v", took)
	}

	rabbitctl.Run(t, node, "set_vm_memory_high_watermark", "0.4")
	publishUntilDone(t, p, patience, large)
	eventually(t, "all messages in the queue", func() bool { return b.depth(queue) >= len(large) })
	copies := b.drain(queue)
	wantIDs(t, copies, large)
	for id, n := range ids(copies) {
		if n > 2 {
			t.Errorf("message %s: %d copies, one was sent before the alarm and one after it", id, n)
		}
	}
}

func TestB27_CloseWhileBlocked(t *testing.T) {
	t.Parallel()
	node := testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{})
	queue := dialBroker(t, node.URL()).queue(nil)
	rabbitctl.Run(t, node, "set_vm_memory_high_watermark", "0.0001")
	defer rabbitctl.Run(t, node, "set_vm_memory_high_watermark", "0.4")
	p := openPublisher(t, PublisherConfig{URL: node.URL()})
	answers := make(chan error, 1)
	large := record(queue, strings.Repeat("x", 32<<20))
	go func() { answers <- p.Publish(context.Background(), []outbox.Record{large})[0] }()
	eventually(t, "the alarm is noticed", p.isBlocked)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	start := time.Now()
	if err := p.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close: %v", err)
	}
	if took := time.Since(start); took > patience {
		t.Errorf("Close took %v", took)
	}
	if err := <-answers; err == nil {
		t.Error("a message without a confirm counts as delivered")
	}
}

func TestB25_BrokerRestart(t *testing.T) {
	t.Parallel()
	node := testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{})
	queue := queueOnDisk(t, node)
	p := openPublisher(t, PublisherConfig{URL: node.URL()})
	batch := records(queue, 2000)
	mustPublish(t, p, batch[:1000]...)
	if err := node.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := publish(t, p, patience, batch[1000])[0]; kind(err) != "unavailable" {
		t.Errorf("while the broker is down: %v", err)
	}
	back := make(chan error, 1)
	go func() { back <- node.Restart(context.Background()) }()
	for i := 1000; i < len(batch); i += 100 {
		publishUntilDone(t, p, 5*time.Second, batch[i:i+100])
	}
	if err := <-back; err != nil {
		t.Fatal(err)
	}
	wantIDs(t, dialBroker(t, node.URL()).drain(queue), batch)
}

func TestPublishPermanentWhenOverTheBrokersLimit(t *testing.T) {
	t.Parallel()
	node := testenv.PrivateRabbitMQ(t, devserver.RabbitMQOptions{Config: []string{"max_message_size = 1000"}})
	b := dialBroker(t, node.URL())
	queue := b.queue(nil)
	p := openPublisher(t, PublisherConfig{URL: node.URL()})
	batch := records(queue, 20)
	batch[7] = record(queue, strings.Repeat("x", 2000))
	for i, err := range publish(t, p, patience, batch...) {
		if want := map[bool]string{true: "permanent", false: "ok"}[i == 7]; kind(err) != want {
			t.Errorf("message %d: %v, want %s", i, err, want)
		}
	}
	wantIDs(t, b.drain(queue), append(batch[:7:7], batch[8:]...))
}
