package rabbitmq

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// kind tells how a relay reads an error, by the words that outbox puts in front of it.
func kind(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, outbox.ErrNotTried):
		return "not_tried"
	case strings.HasPrefix(err.Error(), "permanent"):
		return "permanent"
	case strings.HasPrefix(err.Error(), "unavailable"):
		return "unavailable"
	default:
		return "retryable"
	}
}

func TestPublishMapsTheMessage(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	b := dialBroker(t, url)
	exchange, queue := b.exchange(), b.queue(nil)
	b.bind(queue, "orders.#", exchange)
	p := openPublisher(t, PublisherConfig{URL: url, Exchange: exchange})
	r := record("orders.paid", "\x00payload")
	r.Key, r.ContentType, r.Headers = "order-1", "application/json", map[string]string{"traceparent": "00-ab-cd-01"}
	mustPublish(t, p, r)

	d := b.drain(queue)[0]
	if d.MessageId != r.ID.String() || d.RoutingKey != "orders.paid" || d.Exchange != exchange || string(d.Body) != "\x00payload" {
		t.Errorf("delivery: %+v", d)
	}
	if d.ContentType != "application/json" || d.DeliveryMode != amqp.Persistent || d.Timestamp.Unix() != r.EnqueuedAt.Unix() {
		t.Errorf("properties: %+v", d)
	}
	if d.Headers["traceparent"] != "00-ab-cd-01" || d.Headers[HeaderOutbox] != "1" || d.Headers[HeaderKey] != "order-1" {
		t.Errorf("headers: %v", d.Headers)
	}
}

func TestB24_MissingExchange(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	p := openPublisher(t, PublisherConfig{URL: url, Route: func(r outbox.Record) Route {
		if r.Topic == "missing" {
			return Route{Exchange: "no-such-exchange", Key: "x"}
		}
		return Route{Key: queue}
	}})
	good := records("good", 50)
	errs := publish(t, p, patience, append([]outbox.Record{record("missing", "")}, good...)...)
	if kind(errs[0]) != "retryable" || !strings.Contains(errs[0].Error(), "no-such-exchange") {
		t.Errorf("message to the missing exchange: %v", errs[0])
	}
	for i, err := range errs[1:] {
		if err != nil {
			t.Errorf("good message %d: %v", i, err)
		}
	}
	got := b.drain(queue)
	wantIDs(t, got, good)
	if len(got) != len(good) {
		t.Errorf("%d copies of %d messages: the missing exchange disturbed the others", len(got), len(good))
	}
	mustPublish(t, p, record("good", "after"))
}

func TestB24_NackIsNotDelivered(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	b := dialBroker(t, url)
	queue := b.queue(amqp.Table{"x-max-length": 1, "x-overflow": "reject-publish"})
	p := openPublisher(t, PublisherConfig{URL: url})
	first := record(queue, "1")
	mustPublish(t, p, first)
	second := record(queue, "2")
	if err := publish(t, p, patience, second)[0]; !errors.Is(err, ErrRefused) || kind(err) != "retryable" {
		t.Fatalf("full queue: %v", err)
	}
	wantIDs(t, b.drain(queue), []outbox.Record{first})
	mustPublish(t, p, second)
	wantIDs(t, b.drain(queue), []outbox.Record{second})
}

func TestB24_CutInTheMiddleOfABatch(t *testing.T) {
	t.Parallel()
	b := dialBroker(t, testenv.RabbitMQ(t))
	proxy := newProxy(t, testenv.RabbitMQ(t))
	p := openPublisher(t, PublisherConfig{URL: proxy.url})
	for m, nth := range map[method]int{clientPublish: 150, serverAck: 1} {
		queue := b.queue(nil)
		batch := records(queue, 300)
		seen := 0
		proxy.set(func(got method) fate {
			if got != m {
				return pass
			}
			if seen++; seen == nth {
				return cut
			}
			return pass
		})
		errs := publish(t, p, patience, batch...)
		proxy.set(nil)
		copies := ids(b.drain(queue))
		failed := 0
		for i, err := range errs {
			if err == nil && copies[batch[i].ID.String()] == 0 {
				t.Errorf("message %d is confirmed but not in the queue", i)
			}
			if err != nil {
				failed++
			}
		}
		if failed == 0 {
			t.Error("the cut failed no message")
		}
		publishUntilDone(t, p, patience, batch)
		wantIDs(t, b.drain(queue), batch)
	}
}

func TestB25_ConfirmNeverComes(t *testing.T) {
	t.Parallel()
	b := dialBroker(t, testenv.RabbitMQ(t))
	proxy := newProxy(t, testenv.RabbitMQ(t))
	queue := b.queue(nil)
	p := openPublisher(t, PublisherConfig{URL: proxy.url})
	var channels atomic.Int64
	proxy.set(func(m method) fate {
		switch m {
		case serverAck:
			return drop
		case clientChannelOpen:
			channels.Add(1)
		}
		return pass
	})
	r := record(queue, "x")
	for range 2 {
		start := time.Now()
		err := publish(t, p, 3*time.Second, r)[0] // the first call connects
		if !errors.Is(err, ErrUnconfirmed) || !errors.Is(err, context.DeadlineExceeded) || kind(err) != "retryable" {
			t.Fatalf("without a confirm: %v", err)
		}
		if took := time.Since(start); took > patience {
			t.Errorf("the call came back after %v", took)
		}
	}
	if n := channels.Load(); n != 2 {
		t.Errorf("%d channels for 2 calls: one that owes an answer was used again", n)
	}
	proxy.set(nil)
	publishUntilDone(t, p, patience, []outbox.Record{r})
	got := ids(b.drain(queue))
	if len(got) != 1 || got[r.ID.String()] < 2 {
		t.Errorf("copies by id: %v; want one id, sent again", got)
	}
}

func TestB26_Unroutable(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	b := dialBroker(t, url)
	exchange, queue := b.exchange(), b.queue(nil)
	b.bind(queue, "bound", exchange)
	p := openPublisher(t, PublisherConfig{URL: url, Exchange: exchange})
	lost, good := record("unbound", "lost"), records("bound", 20)
	batch := append([]outbox.Record{lost}, good...)
	for i, err := range publish(t, p, patience, batch...) {
		if unroutable := errors.Is(err, ErrUnroutable); unroutable != (i == 0) || (i > 0 && err != nil) {
			t.Errorf("message %d: %v", i, err)
		}
		if i == 0 && (kind(err) != "retryable" || !strings.Contains(err.Error(), "unroutable")) {
			t.Errorf("reason: %v", err)
		}
	}
	wantIDs(t, b.drain(queue), good)
	b.bind(queue, "unbound", exchange)
	mustPublish(t, p, lost)
	wantIDs(t, b.drain(queue), []outbox.Record{lost})
}

// A whole batch comes back before any of it is confirmed; none may be taken for delivered.
func TestB26_UnroutableLargeBatch(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	p := openPublisher(t, PublisherConfig{URL: url, Exchange: dialBroker(t, url).exchange()})
	for i, err := range publish(t, p, patience, records("nowhere", 2*returnsMin)...) {
		if !errors.Is(err, ErrUnroutable) {
			t.Fatalf("message %d: %v", i, err)
		}
	}
}

func TestB26_UnroutableAllowed(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	exchange := dialBroker(t, url).exchange()
	p := openPublisher(t, PublisherConfig{URL: url, Route: func(r outbox.Record) Route {
		return Route{Exchange: exchange, Key: r.Topic, AllowUnroutable: r.Topic == "fanout"}
	}})
	errs := publish(t, p, patience, record("fanout", ""), record("strict", ""))
	if errs[0] != nil || !errors.Is(errs[1], ErrUnroutable) {
		t.Errorf("answers: %v", errs)
	}
}

func TestPublishRefusesWhatTheProtocolCannotCarry(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	p := openPublisher(t, PublisherConfig{URL: url})
	longKey, longName, manyHeaders := record(strings.Repeat("k", 256), ""), record(queue, ""), record(queue, "")
	longName.Headers = map[string]string{strings.Repeat("n", 256): ""}
	manyHeaders.Headers = map[string]string{"big": strings.Repeat("v", 200_000)}
	good := record(queue, "good")
	errs := publish(t, p, patience, longKey, longName, manyHeaders, good)
	for i, err := range errs[:3] {
		if kind(err) != "permanent" || !errors.Is(err, ErrTooLarge) {
			t.Errorf("message %d: %v", i, err)
		}
	}
	if errs[3] != nil {
		t.Errorf("good message: %v", errs[3])
	}
	wantIDs(t, b.drain(queue), []outbox.Record{good})
}

func TestPublishUnavailable(t *testing.T) {
	t.Parallel()
	p := openPublisher(t, PublisherConfig{URL: "amqp://guest:secret@127.0.0.1:1/"})
	for _, err := range publish(t, p, patience, records("t", 3)...) {
		if kind(err) != "unavailable" || strings.Contains(err.Error(), "secret") {
			t.Errorf("refused connection: %v", err)
		}
	}
}

func TestPublishTriesTheAlternates(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	b := dialBroker(t, url)
	p := openPublisher(t, PublisherConfig{URL: "amqp://127.0.0.1:1/", Alternates: []string{"amqp://127.0.0.1:2/", url}})
	r := record(b.queue(nil), "")
	mustPublish(t, p, r)
	wantIDs(t, b.drain(r.Topic), []outbox.Record{r})
}

func TestPublishAfterClose(t *testing.T) {
	t.Parallel()
	url := testenv.RabbitMQ(t)
	p := openPublisher(t, PublisherConfig{URL: url})
	mustPublish(t, p, record(dialBroker(t, url).queue(nil), ""))
	for range 2 {
		if err := p.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := publish(t, p, patience, record("t", ""))[0]; !errors.Is(err, ErrClosed) || kind(err) != "unavailable" {
		t.Errorf("after Close: %v", err)
	}
}

func TestCloseBreaksOffAHangingPublish(t *testing.T) {
	t.Parallel()
	b := dialBroker(t, testenv.RabbitMQ(t))
	proxy := newProxy(t, testenv.RabbitMQ(t))
	p := openPublisher(t, PublisherConfig{URL: proxy.url})
	published := make(chan struct{}, 1)
	proxy.set(func(m method) fate {
		switch m {
		case clientPublish:
			published <- struct{}{}
		case serverAck:
			return drop
		}
		return pass
	})
	answers := make(chan []error, 1)
	r := record(b.queue(nil), "")
	go func() { answers <- p.Publish(context.Background(), []outbox.Record{r}) }()
	<-published
	ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := p.Close(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Close: %v", err)
	}
	if err := (<-answers)[0]; err == nil {
		t.Error("a message without a confirm counts as delivered")
	}
}

func TestNewPublisherRefusesBadConfig(t *testing.T) {
	t.Parallel()
	_, err := NewPublisher(PublisherConfig{URL: "http://user:pass/word@host", Alternates: []string{"amqp://ok", "::"}, Timeout: -1})
	if err == nil {
		t.Fatal("accepted")
	}
	for _, want := range []string{"URL is not", "Alternates[1]", "Timeout"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%q does not name %s", err, want)
		}
	}
	if strings.Contains(err.Error(), "pass/word") {
		t.Errorf("credentials in %q", err)
	}
}
