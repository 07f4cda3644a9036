package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

func traceparent(digit string) string { return fmt.Sprintf("00-%032s-%016s-01", digit, digit) }

// Messages of requests A and B are published by a relay that works under a third one: the stored contexts are sent on, and
// are what the publisher's spans are linked to. What is broken costs its link and nothing else.
func TestB85_TheTraceIsThatOfTheRequestThatEnqueued(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	box, err := outbox.New(outbox.Config{HeadersMax: 200, Trace: storeTrace})
	must(t, err)
	send := func(trace string, m outbox.Message) {
		t.Helper()
		tx, ctx := begin(t, db), t.Context()
		if trace != "" {
			ctx = context.WithValue(ctx, spanKey{}, span{traceparent: trace, tracestate: "vendor=" + m.Key})
		}
		_, err := box.Enqueue(ctx, tx, m)
		must(t, err)
		must(t, tx.Commit(t.Context()))
	}
	own := message("k", "own")
	own.Headers = map[string]string{"traceparent": traceparent("c"), "a": "b"}
	send(traceparent("a"), message("k", "A"))
	send(traceparent("b"), message("k", "B"))
	send(traceparent("d"), own) // its own wins, and gets no state of another trace
	send("broken", message("k", "broken"))
	send("", message("k", "none"))
	_, err = db.Pool.Exec(t.Context(), `select commitbox.enqueue('t', 'stored', 'k', '{"traceparent": "broken", "tracestate": "x=y"}')`)
	must(t, err)

	var links []string
	p := &recorder{}
	relay := newRelay(t, db.Pool, linking{p, func(s span) { links = append(links, s.link+" "+s.tracestate) }}, brisk())
	for range 3 {
		_, err := relay.RunOnce(context.WithValue(t.Context(), spanKey{}, span{traceparent: traceparent("e")}))
		must(t, err)
	}
	must(t, relay.Close())
	var sent []map[string]string
	for _, r := range p.sent {
		sent = append(sent, r.Headers)
	}
	if diff := cmp.Diff([]map[string]string{
		{"traceparent": traceparent("a"), "tracestate": "vendor=k"},
		{"traceparent": traceparent("b"), "tracestate": "vendor=k"},
		{"traceparent": traceparent("c"), "a": "b"},
		nil, nil,
		{"traceparent": "broken", "tracestate": "x=y"},
	}, sent); diff != "" {
		t.Errorf("headers (-want +sent):\n%s", diff)
	}
	if diff := cmp.Diff([]string{traceparent("a") + " vendor=k", traceparent("b") + " vendor=k", traceparent("c") + " ", " ", " ", " "}, links); diff != "" {
		t.Errorf("links (-want +got):\n%s", diff)
	}
	if len(own.Headers) != 2 {
		t.Errorf("the caller's headers were changed: %v", own.Headers)
	}

	long := message("k", "x")
	long.Headers = map[string]string{"a": fmt.Sprintf("%0150d", 1)}
	ctx := context.WithValue(t.Context(), spanKey{}, span{traceparent: traceparent("a")})
	if _, err := box.Enqueue(ctx, begin(t, db), long); !errors.As(err, new(*commitbox.InputError)) {
		t.Errorf("headers over the limit with their trace: %v", err)
	}
}

// Whatever way a message takes, and whoever sends it on that way, it keeps the trace of the request that enqueued it: for
// later, failed, dead and requeued, replayed.
func TestB85_TheTraceGoesWithTheMessage(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	keeping(t, db, 1)
	box, err := outbox.New(outbox.Config{Trace: storeTrace})
	must(t, err)
	tx, ctx := begin(t, db), context.WithValue(t.Context(), spanKey{}, span{traceparent: traceparent("a")})
	_, err = box.Enqueue(ctx, tx, later("k", "later", 300*time.Millisecond), message("f", "dies"), message("f", "behind"))
	must(t, err)
	must(t, tx.Commit(t.Context()))

	var mu sync.Mutex
	var links []string
	s := refusing("dies")
	p := &recorder{fail: s.fail}
	cfg := brisk()
	cfg.MaxAttempts = 2
	start(t, newRelay(t, db.Pool, linking{p, func(s span) {
		mu.Lock()
		defer mu.Unlock()
		links = append(links, s.link)
	}}, cfg))
	eventually(t, "two messages and a dead one", func() bool { return len(p.payloads()) == 2 && tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	s.accept()
	operator := context.WithValue(t.Context(), spanKey{}, span{traceparent: traceparent("e")})
	n, err := o.RequeueMany(operator, outbox.RequeueFilter{})
	must(t, found(n, err))
	eventually(t, "three kept messages", func() bool { return count(t, db, "select count(*) from commitbox.outbox_sent") == 3 })
	n, err = o.Replay(operator, outbox.ReplayFilter{Since: time.Now().Add(-time.Hour), Rate: 1000})
	if err != nil || n != 3 {
		t.Fatalf("replayed %d, %v", n, err)
	}
	eventually(t, "three more", func() bool { return len(p.payloads()) == 6 })
	mu.Lock()
	defer mu.Unlock()
	if len(links) != 8 { // six that were confirmed, two that were refused
		t.Errorf("%d spans", len(links))
	}
	for i, link := range links {
		if link != traceparent("a") {
			t.Errorf("span %d is linked to %q", i, link)
		}
	}
	for _, r := range p.sent {
		if r.Headers["traceparent"] != traceparent("a") {
			t.Errorf("%s was sent with %v", r.Payload, r.Headers)
		}
	}
}

// A tracer that does nothing has hooks that return nothing, or empty values.
func TestB85_ATracerThatDoesNothingBreaksNothing(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	for name, hook := range map[string]func(context.Context) map[string]string{
		"nil":    func(context.Context) map[string]string { return nil },
		"none":   func(context.Context) map[string]string { return map[string]string{} },
		"values": func(context.Context) map[string]string { return map[string]string{"traceparent": "", "tracestate": ""} },
	} {
		box, err := outbox.New(outbox.Config{Trace: hook})
		must(t, err)
		tx := begin(t, db)
		_, err = box.Enqueue(t.Context(), tx, message("k", name))
		must(t, err)
		must(t, tx.Commit(t.Context()))
	}
	start(t, newRelay(t, db.Pool, linking{p, func(span) {}}, brisk()))
	eventually(t, "three messages", func() bool { return len(p.payloads()) == 3 })
	for _, r := range p.sent {
		if len(r.Headers) != 0 {
			t.Errorf("%s has headers %v", r.Payload, r.Headers)
		}
	}
}
