package rabbitmq

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// TestLeasedConsumer: a handler that fails behind a step goes on behind it, a panic is a failure, a copy waits for the lease,
// and everything is acknowledged in the end.
func TestLeasedConsumer(t *testing.T) {
	t.Parallel()
	url, db, s := testenv.RabbitMQ(t), testenv.Database(t), newShop(t)
	b := dialBroker(t, url)
	queue, dead := b.queue(nil), b.queue(nil)
	r := record(queue, "payload")
	p := openPublisher(t, PublisherConfig{URL: url})
	mustPublish(t, p, r, r)
	box, err := inbox.New(db.Pool, inbox.Config{BackoffBase: 10 * time.Millisecond, BackoffMax: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	var charges, runs, done atomic.Int32
	c, err := NewLeasedConsumer(box, ConsumerConfig{URL: url, Queue: queue, Name: "charge", DeadLetterQueue: dead, Observer: s},
		func(ctx context.Context, lease *inbox.Lease, d Delivery) error {
			_, err := inbox.Step(ctx, lease, "charge", func(context.Context) (int32, error) { return charges.Add(1), nil })
			if err != nil {
				return err
			}
			switch runs.Add(1) {
			case 1:
				return errors.New("fails")
			case 2:
				panic("panics")
			}
			if string(d.Payload) != "payload" || lease.Attempt() != 3 {
				t.Errorf("payload %q, attempt %d", d.Payload, lease.Attempt())
			}
			done.Add(1)
			return nil
		})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	eventually(t, "both copies acknowledged", func() bool { return s.settlements()[settledAck] == 2 })
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if charges.Load() != 1 || done.Load() != 1 || runs.Load() != 3 || b.depth(queue) != 0 || b.depth(dead) != 0 {
		t.Errorf("%d charges, %d runs, %d left, %d dead", charges.Load(), runs.Load(), b.depth(queue), b.depth(dead))
	}
	if _, err := NewLeasedConsumer(box, ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead}, nil); err == nil {
		t.Error("no handler is no error")
	}
}
