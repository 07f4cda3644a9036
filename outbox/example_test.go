package outbox_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// A change and the message that announces it, in one transaction and one round trip.
func ExampleQueue() {
	pay := func(ctx context.Context, pool *pgxpool.Pool, order string) error {
		batch := new(pgx.Batch)
		batch.Queue("update orders set paid = true where id = $1", order)
		if _, err := outbox.Queue(ctx, batch, outbox.Message{Topic: "orders.paid", Key: order}); err != nil {
			return err
		}
		return pool.SendBatch(ctx, batch).Close() // a transaction of its own; in one that is open: tx.SendBatch
	}
	_ = pay
}

// span is what a tracing library has: here the trace context of a piece of work, and the one it is linked to.
type span struct{ traceparent, tracestate, link string }

type spanKey struct{}

// storeTrace is the first hook. It runs in the request that enqueues, and returns what is stored with the message.
func storeTrace(ctx context.Context) map[string]string {
	s, ok := ctx.Value(spanKey{}).(span)
	if !ok {
		return nil
	}
	return map[string]string{"traceparent": s.traceparent, "tracestate": s.tracestate}
}

// linking is the second hook: a publisher around the real one, which starts a span for each message, linked to the request
// that enqueued it.
type linking struct {
	next  outbox.Publisher
	start func(s span)
}

func (p linking) Publish(ctx context.Context, batch []outbox.Record) []error {
	for _, r := range batch {
		traceparent, tracestate := r.TraceContext()
		p.start(span{link: traceparent, tracestate: tracestate})
	}
	return p.next.Publish(ctx, batch)
}

// The trace of a request goes with its message in two steps: Config.Trace stores it, a Publisher links to it. With
// OpenTelemetry, the first one injects propagation.TraceContext into a MapCarrier, and the second one extracts it from
// Record.Headers into an empty context and gives trace.LinkFromContext to Start.
func ExampleConfig_trace() {
	box, err := outbox.New(outbox.Config{Trace: storeTrace})
	if err != nil {
		panic(err)
	}
	_ = box.Enqueue // in the request: box.Enqueue(ctx, tx, message)

	publisher := linking{
		next:  outbox.PublishFunc(func(context.Context, outbox.Record) error { return nil }),
		start: func(s span) { fmt.Printf("publish, linked to %q\n", s.link) },
	}
	// What a relay does, in a context of its own.
	publisher.Publish(context.Background(), []outbox.Record{
		{Message: outbox.Message{Headers: map[string]string{"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}}},
		{Message: outbox.Message{Headers: map[string]string{"traceparent": "broken"}}},
	})
	// Output:
	// publish, linked to "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	// publish, linked to ""
}
