package main

import (
	"context"
	"hash/fnv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// broker is a queue in this process. It delivers every message one to three times, and again until it is settled.
type broker struct {
	queue                     chan delivery
	open                      atomic.Int64 // deliveries that are not settled
	delivered, again, refused atomic.Int64
}

type delivery struct {
	msg    inbox.Message
	handle func(context.Context, inbox.Message) error
}

func newBroker(capacity int) *broker { return &broker{queue: make(chan delivery, capacity)} }

// put takes a message in. It does not block: the queue has room for all copies of everything.
func (b *broker) put(id string, payload []byte, handle func(context.Context, inbox.Message) error) {
	msg := inbox.Message{ID: inbox.ID{Message: id}, Payload: payload, Fingerprint: inbox.FingerprintOf(payload)}
	for range copiesOf(id) {
		b.open.Add(1)
		b.queue <- delivery{msg, handle}
	}
}

// publisher is what a relay hands its messages to.
func (b *broker) publisher(handle func(context.Context, inbox.Message) error) outbox.Publisher {
	return outbox.PublishFunc(func(_ context.Context, r outbox.Record) error {
		b.put(r.ID.String(), r.Payload, handle)
		return nil
	})
}

const copiesMax = 3

func copiesOf(id string) int {
	h := fnv.New32a()
	h.Write([]byte(id))
	return 1 + int(h.Sum32()%copiesMax)
}

// workers is how many deliveries are handled at the same time.
const workers = 8

// consume handles deliveries until ctx ends.
func (b *broker) consume(ctx context.Context) error {
	var running sync.WaitGroup
	for range workers {
		running.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case d := <-b.queue:
					b.deliver(ctx, d)
				}
			}
		})
	}
	running.Wait()
	return nil
}

// redelivery is short, so that nobody has to wait for the end of the program.
const redelivery = 50 * time.Millisecond

func (b *broker) deliver(ctx context.Context, d delivery) {
	b.delivered.Add(1)
	switch inbox.Disposition(d.handle(ctx, d.msg)).Verdict {
	case inbox.Ack:
		b.open.Add(-1)
	case inbox.DeadLetter:
		b.refused.Add(1)
		b.open.Add(-1)
	default:
		b.again.Add(1)
		time.AfterFunc(redelivery, func() { b.queue <- d }) // it has its place: it was taken out
	}
}
