package outbox_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

func TestRelayPublishesWhatWasCommittedInOrder(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))

	want := map[string][]string{}
	for i := range 300 {
		key := fmt.Sprint("k", i%7)
		payload := fmt.Sprint(i)
		enqueue(t, db, message(key, payload))
		want[key] = append(want[key], payload)
	}
	eventually(t, "300 messages", func() bool { return len(p.payloads()) >= 300 })
	for key := range want {
		if diff := cmp.Diff(want[key], p.payloads(key)); diff != "" {
			t.Errorf("key %s (-want +got):\n%s", key, diff)
		}
	}
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
}

func TestRelayHandsOverTheWholeMessage(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	sent := outbox.Message{
		Topic: "orders.placed", Key: "k", ContentType: "application/json",
		Headers: map[string]string{"a": "1", "<b>": "ü"}, Payload: []byte("{\"b\":1e2,\"aa\":1.10,\"b\":2}  \x00\xff"),
	}
	ids := enqueue(t, db, sent)
	relay := newRelay(t, db.Pool, p, brisk())
	n, err := relay.RunOnce(t.Context())
	if err != nil || n != 1 {
		t.Fatalf("RunOnce: %d, %v", n, err)
	}
	if err := relay.Close(); err != nil {
		t.Fatal(err)
	}
	sent.ID, sent.Channel = ids[0], outbox.DefaultChannel
	got := p.sent[0]
	if diff := cmp.Diff(sent, got.Message); diff != "" {
		t.Errorf("message (-enqueued +published):\n%s", diff)
	}
	if got.Attempt != 1 || got.Position == 0 || got.EnqueuedAt.IsZero() {
		t.Errorf("record: attempt %d, position %d, enqueued at %v", got.Attempt, got.Position, got.EnqueuedAt)
	}
}
