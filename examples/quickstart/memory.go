package main

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// memory is a broker inside this process: what a delivery is answered with decides whether it is gone or comes again,
// and what a consumer held when it ended comes again too.
type memory struct {
	queues map[string]chan inbox.Message
	open   atomic.Int64 // deliveries that are not settled
}

// queueLen is how many deliveries wait in a queue before publishing does.
const queueLen = 256

func newMemory() *memory {
	m := &memory{queues: map[string]chan inbox.Message{}}
	for name := range queues {
		m.queues[name] = make(chan inbox.Message, queueLen)
	}
	return m
}

func (m *memory) publisher() (outbox.Publisher, func(), error) {
	return outbox.PublishFunc(m.publish), func() {}, nil
}

// publish puts a copy into every queue that wants the topic. It comes back with nil when all have it.
func (m *memory) publish(ctx context.Context, r outbox.Record) error {
	msg := inbox.Message{
		ID: inbox.ID{Message: r.ID.String()}, Payload: r.Payload, Headers: r.Headers, Fingerprint: inbox.FingerprintOf(r.Payload),
	}
	for name, topics := range queues {
		for _, topic := range topics {
			if topic != r.Topic {
				continue
			}
			m.open.Add(1)
			select {
			case m.queues[name] <- msg:
			case <-ctx.Done():
				m.open.Add(-1)
				return ctx.Err()
			}
		}
	}
	return nil
}

func (m *memory) consume(ctx context.Context, box *inbox.Box, queue string, handle handler) error {
	var running sync.WaitGroup
	defer running.Wait()
	for range workers {
		running.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case msg := <-m.queues[queue]:
					msg.ID.Consumer = queue
					m.deliver(ctx, box, msg, handle)
				}
			}
		})
	}
	return nil
}

func (m *memory) deliver(ctx context.Context, box *inbox.Box, msg inbox.Message, handle handler) {
	_, err := inbox.Process(ctx, box, msg, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, handle(ctx, tx, msg)
	})
	switch action := inbox.Disposition(err); action.Verdict {
	case inbox.Ack, inbox.DeadLetter:
		m.open.Add(-1)
	default:
		time.AfterFunc(action.After, func() { m.queues[msg.ID.Consumer] <- msg })
	}
}

func (m *memory) waiting(context.Context) (int, error) { return int(m.open.Load()), nil }
