package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// send publishes a message that does not come from an outbox.
func (b *broker) send(queue string, p amqp.Publishing) {
	b.t.Helper()
	if err := b.ch.PublishWithContext(b.t.Context(), "", queue, true, false, p); err != nil {
		b.t.Fatal(err)
	}
}

func TestMissingIDGoesToTheDeadLetters(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue, dead := b.queue(nil), b.queue(nil)
	b.send(queue, amqp.Publishing{Body: []byte(`{"id":"looks like one"}`), Headers: amqp.Table{"h": "v"}})
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead}, s.record)
	eventually(t, "one settlement", func() bool { return s.settlements()[settledMissingID] == 1 })
	mustStop(t, stop)
	got := b.drain(dead)
	if len(got) != 1 || string(got[0].Body) != `{"id":"looks like one"}` || got[0].Headers["h"] != "v" || got[0].Headers[HeaderReason] != "missing_id" {
		t.Errorf("dead letters: %+v", got)
	}
	if !s.failed(ErrMissingID) || s.effects() != 0 || b.depth(queue) != 0 {
		t.Error("the message was handled, or not reported, or is left in its queue")
	}
}

func TestMessageIDExtractor(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	for range 2 {
		b.send(queue, amqp.Publishing{Headers: amqp.Table{"event": int32(7)}})
	}
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, MessageID: func(d Delivery) string { return d.Headers["event"] }}, s.record)
	eventually(t, "both acknowledged", func() bool { return s.settlements()[settledAck] == 2 })
	mustStop(t, stop)
	if d := s.deliveries(); len(d) != 1 || d[0].ID.Message != "7" || d[0].Fingerprint != nil {
		t.Errorf("deliveries: %+v", d)
	}
}

func TestIDThatCannotBeStored(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue, dead := b.queue(nil), b.queue(nil)
	b.send(queue, amqp.Publishing{MessageId: "\xff"})
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead}, s.record)
	eventually(t, "a dead letter", func() bool { return s.settlements()[settledDeadLetter] == 1 })
	mustStop(t, stop)
	if got := b.drain(dead); len(got) != 1 || got[0].Headers[HeaderReason] != "invalid" {
		t.Errorf("dead letters: %+v", got)
	}
}

// failFirst is a handler that fails the first n calls.
func (s *shop) failFirst(n int) handlerFunc {
	left := make(chan struct{}, n)
	for range n {
		left <- struct{}{}
	}
	return func(ctx context.Context, tx pgx.Tx, d Delivery) error {
		if err := s.record(ctx, tx, d); err != nil {
			return err
		}
		select {
		case <-left:
			return errors.New("not yet")
		default:
			return nil
		}
	}
}

// retryQueue declares a queue whose messages go back to another one when they expire.
func (b *broker) retryQueue(back string) string {
	return b.queue(amqp.Table{"x-dead-letter-exchange": "", "x-dead-letter-routing-key": back})
}

func TestRetryQueue(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	exchange, queue := b.exchange(), b.queue(amqp.Table{"x-queue-type": "quorum"})
	retry := b.retryQueue(queue)
	b.bind(queue, "orders.#", exchange)
	r := record("orders.paid", "x")
	r.Key = "k"
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url, Exchange: exchange}), r)
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, RetryQueue: retry}, s.failFirst(2))
	eventually(t, "an ack", func() bool { return s.settlements()[settledAck] == 1 })
	mustStop(t, stop)
	s.wantEffects([]outbox.Record{r})
	if n := s.settlements()[settledRetry]; n < 2 || b.depth(retry) != 0 || b.depth(queue) != 0 {
		t.Errorf("%d retries, %d messages in the retry queue, %d in the queue", n, b.depth(retry), b.depth(queue))
	}
	for i, d := range s.deliveries() {
		if d.Topic != "orders.paid" || d.Exchange != exchange || d.Key != "k" || d.Redelivered != (i > 0) || d.Delivery < i+1 || d.Fingerprint == nil {
			t.Errorf("delivery %d: %+v", i, d)
		}
	}
}

func TestHeldDelay(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	batch := records(queue, 10)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), batch...)
	// Fewer places than failing messages: workers wait for a place.
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, Workers: 2, HeldMax: 1}, s.failFirst(10))
	eventually(t, "all acknowledged", func() bool { return s.settlements()[settledAck] == len(batch) })
	mustStop(t, stop)
	s.wantEffects(batch)
	if n := s.settlements()[settledRetry]; n < 10 || b.depth(queue) != 0 {
		t.Errorf("%d retries, %d messages left", n, b.depth(queue))
	}
}

func TestStopGivesHeldDeliveriesBack(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	s.box = s.newBox(s.pool, inbox.Config{BackoffBase: time.Hour, BackoffMax: time.Hour})
	b := dialBroker(t, url)
	queue := b.queue(nil)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), records(queue, 5)...)
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, HoldMax: time.Hour}, s.failFirst(5))
	eventually(t, "all held", func() bool { return s.settlements()[settledRetry] == 5 })
	if n := b.depth(queue); n != 0 {
		t.Errorf("%d messages were not held", n)
	}
	mustStop(t, stop)
	if n := b.depth(queue); n != 5 {
		t.Errorf("%d of 5 messages are back", n)
	}
}

func TestMismatchGoesToTheDeadLetters(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue, dead := b.queue(nil), b.queue(nil)
	p := openPublisher(t, PublisherConfig{URL: url})
	r := record(queue, "one payload")
	forged := r
	forged.Payload = []byte("another payload")
	mustPublish(t, p, r)
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead}, s.record)
	eventually(t, "an ack", func() bool { return s.settlements()[settledAck] == 1 })
	mustPublish(t, p, forged)
	// Without the mark of an outbox nobody promised the same bytes.
	b.send(queue, amqp.Publishing{MessageId: r.ID.String(), Body: []byte("a third")})
	eventually(t, "all settled", func() bool { return s.settlements()[settledAck] == 2 && s.settlements()[settledDeadLetter] == 1 })
	mustStop(t, stop)
	s.wantEffects([]outbox.Record{r})
	if got := b.drain(dead); len(got) != 1 || string(got[0].Body) != "another payload" || got[0].Headers[HeaderReason] != "mismatch" || got[0].Headers[HeaderTopic] != queue {
		t.Errorf("dead letters: %+v", got)
	}
	if !s.failed(inbox.ErrPayloadMismatch) {
		t.Error("the mismatch was not reported")
	}
}

func TestDeadLetterByBroker(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	dead := b.queue(nil)
	queue := b.retryQueue(dead) // the same arguments make a dead-letter queue of it
	b.send(queue, amqp.Publishing{Body: []byte("no id")})
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DeadLetterByBroker: true}, s.record)
	eventually(t, "one settlement", func() bool { return s.settlements()[settledMissingID] == 1 })
	mustStop(t, stop)
	eventually(t, "the dead letter", func() bool { return b.depth(dead) == 1 })
}

// A message that was given up is either in its row or at the broker.
func TestGivenUpMessageIsKeptSomewhere(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue, dead := b.queue(nil), b.queue(nil)
	r := record(queue, "keep me")
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), r)
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead}, func(context.Context, pgx.Tx, Delivery) error {
		return inbox.Permanent(errors.New("no way"))
	})
	eventually(t, "a settlement", func() bool { return s.failed(inbox.ErrDead) })
	mustStop(t, stop)
	var payload []byte
	row := s.pool.QueryRow(t.Context(), `SELECT payload FROM commitbox.inbox WHERE message_id = $1 AND status = 'dead'`, r.ID.String())
	if err := row.Scan(&payload); err != nil {
		t.Fatal(err)
	}
	inBroker := b.drain(dead)
	if inRow := string(payload) == "keep me"; inRow == (len(inBroker) == 1) {
		t.Errorf("in the row: %v, at the broker: %d", inRow, len(inBroker))
	}
	if b.depth(queue) != 0 {
		t.Error("the message is still in its queue")
	}
}

// A message whose new place is missing stays where it is.
func TestMoveThatFailsLosesNothing(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue, dead, retry := b.queue(nil), b.queue(nil), b.queue(nil)
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead, RetryQueue: retry}, s.failFirst(1000))
	eventually(t, "it consumes", func() bool {
		q, err := b.ch.QueueDeclarePassive(queue, true, false, false, false, nil)
		return err == nil && q.Consumers == 1
	})
	for _, name := range []string{dead, retry} {
		if _, err := b.ch.QueueDelete(name, false, false, false); err != nil {
			t.Fatal(err)
		}
	}
	b.send(queue, amqp.Publishing{Body: []byte("no id")})
	b.send(queue, amqp.Publishing{MessageId: uuid.NewString(), Body: []byte("fails")})
	eventually(t, "two failed settlements", func() bool { return s.settlements()[settledError] == 2 })
	mustStop(t, stop)
	if n := b.depth(queue); n != 2 {
		t.Errorf("%d of 2 messages are in the queue", n)
	}
}

func TestMessageIDThatPanicsIsMissing(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue, dead := b.queue(nil), b.queue(nil)
	b.send(queue, amqp.Publishing{Body: []byte("x")})
	cfg := ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead, MessageID: func(d Delivery) string { return string(d.Payload[5:6]) }}
	stop := s.consume(cfg, s.record)
	eventually(t, "a settlement", func() bool { return len(s.settlements()) > 0 })
	mustStop(t, stop)
	if got := b.drain(dead); len(got) != 1 || got[0].Headers[HeaderReason] != "missing_id" || string(got[0].Body) != "x" {
		t.Errorf("settled %v, dead letters: %+v", s.settlements(), got)
	}
}

// Headers that fill a frame to the last leave no room for ours, and less of them is better than none of the message.
func TestDeadLetterWithHugeHeaders(t *testing.T) {
	t.Parallel()
	for _, size := range []int{120000, 130300, 130700} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			t.Parallel()
			url, s := testenv.RabbitMQ(t), newShop(t)
			b := dialBroker(t, url)
			queue, dead := b.queue(nil), b.queue(nil)
			b.send(queue, amqp.Publishing{Headers: amqp.Table{"h": strings.Repeat("x", size)}, Type: "kept", Body: []byte("b")})
			stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead}, s.record)
			eventually(t, "a settlement", func() bool { return len(s.settlements()) > 0 })
			mustStop(t, stop)
			got := b.drain(dead)
			if len(got) != 1 || string(got[0].Body) != "b" || got[0].Type != "kept" || got[0].Headers[HeaderReason] != "missing_id" || got[0].Headers[HeaderTopic] != queue {
				t.Errorf("settled %v, %d dead letters", s.settlements(), len(got))
			}
			if n := b.depth(queue); n != 0 {
				t.Errorf("%d messages are left", n)
			}
		})
	}
}

// The size of headers is never estimated below what they take.
func TestHeadersOfManySmallValuesDoNotFit(t *testing.T) {
	t.Parallel()
	list := make([]any, 1000)
	for i := range list {
		list[i] = int64(1) // 9 bytes each
	}
	o := outgoing{message: amqp.Publishing{Headers: amqp.Table{"nested": amqp.Table{"list": list}, "bytes": []byte("b"), "text": "t"}}}
	if err := o.fits(frameOverhead + 9000); !errors.Is(err, ErrTooLarge) {
		t.Errorf("got %v", err)
	}
	if err := o.fits(frameOverhead + 18000); err != nil {
		t.Errorf("got %v", err)
	}
}

func TestMovedCopy(t *testing.T) {
	t.Parallel()
	raw := amqp.Delivery{
		Exchange: "events", RoutingKey: "orders.paid", MessageId: "m", Expiration: "5", UserId: "guest", Priority: 3, Body: []byte("b"),
		Headers: amqp.Table{
			"own": "kept", "list": []any{int32(1)}, "CC": []any{"other"}, "x-delivery-count": int64(2),
			"x-death": []any{}, "x-first-death-queue": "q", HeaderReason: "dead", HeaderOutbox: "1",
		},
	}
	want := amqp.Publishing{
		MessageId: "m", Priority: 3, Body: []byte("b"), DeliveryMode: amqp.Persistent,
		Headers: amqp.Table{"own": "kept", "list": []any{int32(1)}, HeaderOutbox: "1", HeaderTopic: "orders.paid", HeaderExchange: "events"},
	}
	if diff := cmp.Diff(want, newDelivery("c", raw).moved(raw)); diff != "" {
		t.Error(diff)
	}
}
