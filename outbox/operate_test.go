package outbox_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

const channel = outbox.DefaultChannel

func newOperator(t *testing.T, db *testenv.DB) *outbox.Operator {
	t.Helper()
	o, err := outbox.NewOperator(db.Pool, "")
	must(t, err)
	return o
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// switched refuses the payloads that are in it.
type switched struct {
	mu      sync.Mutex
	refused map[string]bool
}

func refusing(payloads ...string) *switched {
	s := &switched{refused: map[string]bool{}}
	for _, p := range payloads {
		s.refused[p] = true
	}
	return s
}

func (s *switched) fail(r outbox.Record) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refused[string(r.Payload)] {
		return errRefused
	}
	return nil
}

func (s *switched) accept() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.refused)
}

func TestOperatorListsAndRetriesABlockedKey(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	s := refusing("a1")
	p := &recorder{fail: s.fail}
	cfg := brisk()
	cfg.BackoffBase, cfg.BackoffMax = time.Hour, time.Hour
	ids := enqueue(t, db, message("a", "a1"), message("a", "a2"), message("b", "b1"))
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "key a to be blocked with two messages", func() bool {
		keys, err := o.Blocked(t.Context(), channel, "", 0)
		must(t, err)
		return len(keys) == 1 && keys[0].Waiting == 2
	})
	keys, err := o.Blocked(t.Context(), channel, "", 0)
	must(t, err)
	k := keys[0]
	if k.Key != "a" || k.Reason != "retry" || k.Head != ids[0] || k.Topic != "test" || k.Attempts != 1 || k.LastError != "refused" || k.DueIn < 25*time.Minute || time.Since(k.Since) > time.Minute {
		t.Errorf("blocked key %+v", k)
	}
	if keys, err = o.Blocked(t.Context(), channel, "a", 1); err != nil || len(keys) != 0 {
		t.Errorf("after the last key: %v, %v", keys, err)
	}
	s.accept()
	must(t, o.Retry(t.Context(), channel, "a", "the other side is repaired"))
	eventually(t, "key a", func() bool { return len(p.payloads("a")) == 2 })
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
	if err := o.Retry(t.Context(), channel, "a", ""); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("retry of a key that flows: %v", err)
	}
	if n := count(t, db, "select count(*) from commitbox.audit where action = 'outbox_retry' and target = 'default/a' and reason = 'the other side is repaired' and who = session_user"); n != 1 {
		t.Errorf("%d audit rows", n)
	}
}

func TestOperatorParksAndReleasesAKey(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	p := &recorder{}
	must(t, o.Park(t.Context(), channel, "a", "customer asked")) // before any relay has run
	enqueue(t, db, message("a", "a1"), message("b", "b1"))
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "key b", func() bool { return len(p.payloads("b")) == 1 })
	enqueue(t, db, message("a", "a2"))
	must(t, o.Park(t.Context(), channel, "b", ""))
	if err := o.Park(t.Context(), channel, "b", ""); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("parked twice: %v", err)
	}
	time.Sleep(1500 * time.Millisecond) // the owner looks every second
	enqueue(t, db, message("b", "b2"))
	time.Sleep(500 * time.Millisecond)
	if got := p.payloads(); len(got) != 1 {
		t.Errorf("published while parked: %v", got)
	}
	must(t, o.Release(t.Context(), channel, "a", ""))
	must(t, o.Release(t.Context(), channel, "b", ""))
	eventually(t, "both keys", func() bool { return len(p.payloads()) == 4 })
	if diff := cmp.Diff([]string{"a1", "a2"}, p.payloads("a")); diff != "" {
		t.Error(diff)
	}
	if err := o.Release(t.Context(), channel, "a", ""); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("released twice: %v", err)
	}
}

func TestOperatorSkipsTheHead(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	p := &recorder{fail: refusing("a1").fail}
	cfg := brisk()
	cfg.BackoffBase, cfg.BackoffMax = time.Hour, time.Hour
	ids := enqueue(t, db, message("a", "a1"), message("a", "a2"))
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "key a to be blocked", func() bool { return tables(t, db) == "hot 0, deferred 2, dead 0, blocked 1" })
	head, err := o.SkipHead(t.Context(), channel, "a", "")
	if err != nil || head != ids[0] {
		t.Fatalf("skipped %v, %v", head, err)
	}
	eventually(t, "the next one", func() bool { return len(p.payloads("a")) == 1 })
	eventually(t, "the skipped one to be all that is left", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	dead, err := o.Dead(t.Context(), channel, "", outbox.DeadCursor{}, 0)
	must(t, err)
	if len(dead) != 1 || dead[0].ID != ids[0] || dead[0].Key != "a" || dead[0].Attempts != 1 || dead[0].PayloadLen != 2 || !strings.HasPrefix(dead[0].LastError, "skipped by") {
		t.Errorf("dead: %+v", dead)
	}
	if _, err := o.SkipHead(t.Context(), channel, "a", ""); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("skip in a key that flows: %v", err)
	}
}

func TestOperatorDiscardsAndTheKeyGoesOn(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	if _, err := db.Pool.Exec(t.Context(), "insert into commitbox.outbox_channel values ('default', 'hold')"); err != nil {
		t.Fatal(err)
	}
	p := &recorder{fail: refusing("a1").fail}
	cfg := brisk()
	cfg.MaxAttempts = 1
	ids := enqueue(t, db, message("a", "a1"), message("a", "a2"))
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "a1 to be dead", func() bool { return tables(t, db) == "hot 0, deferred 1, dead 1, blocked 1" })
	must(t, o.Discard(t.Context(), channel, ids[0], "not needed any more"))
	eventually(t, "a2", func() bool { return len(p.payloads("a")) == 1 })
	if err := o.Discard(t.Context(), channel, ids[0], ""); !errors.Is(err, outbox.ErrNotFound) {
		t.Errorf("discarded twice: %v", err)
	}
	dead, err := o.Dead(t.Context(), channel, "test", outbox.DeadCursor{}, 10)
	must(t, err)
	if len(dead) != 1 || dead[0].DiscardedAt.IsZero() || dead[0].DiscardedBy == "" {
		t.Errorf("the discarded row: %+v", dead)
	}
	if n, err := o.RequeueMany(t.Context(), outbox.RequeueFilter{DryRun: true}); err != nil || n != 0 {
		t.Errorf("requeue of all would take %d, %v: a discarded one is left alone", n, err)
	}
	must(t, o.Requeue(t.Context(), channel, ids[0], "after all"))
	eventually(t, "a third try", func() bool { return len(p.attempts("a")) == 3 })
}

func TestOperatorRequeuesManyAtARate(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	s := refusing("x", "y")
	p := &recorder{fail: s.fail}
	cfg := brisk()
	cfg.MaxAttempts = 1
	for i := range 120 {
		enqueue(t, db, outbox.Message{Topic: []string{"one", "two"}[i%2], Key: fmt.Sprint("k", i%7), Payload: []byte([]string{"x", "y"}[i%2])})
	}
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "120 dead messages", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 120, blocked 0" })
	s.accept()
	if n, err := o.RequeueMany(t.Context(), outbox.RequeueFilter{Topic: "one", DryRun: true}); err != nil || n != 60 {
		t.Errorf("dry run: %d, %v", n, err)
	}
	if n, err := o.RequeueMany(t.Context(), outbox.RequeueFilter{Until: time.Now().Add(-time.Hour)}); err != nil || n != 0 {
		t.Errorf("those that died more than an hour ago: %d, %v", n, err)
	}
	started := time.Now()
	n, err := o.RequeueMany(t.Context(), outbox.RequeueFilter{Topic: "one", Rate: 50, Reason: "repaired"})
	took := time.Since(started)
	if err != nil || n != 60 {
		t.Fatalf("requeued %d, %v", n, err)
	}
	if took < time.Second {
		t.Errorf("60 messages at 50 per second took %v", took)
	}
	eventually(t, "topic one", func() bool { return len(p.payloads()) == 60 })
	if n, err = o.RequeueMany(t.Context(), outbox.RequeueFilter{Since: started.Add(-time.Hour), Rate: 10_000}); err != nil || n != 60 {
		t.Errorf("the rest: %d, %v", n, err)
	}
	eventually(t, "everything", func() bool { return tables(t, db) == settled })
}

func TestOperatorStats(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	enqueue(t, db, message("a", "1"), message("b", "2"))
	time.Sleep(20 * time.Millisecond)
	s, err := o.Stats(t.Context(), channel)
	must(t, err)
	if s.Oldest < 15*time.Millisecond || s.Oldest > time.Minute {
		t.Errorf("oldest %v", s.Oldest)
	}
	s.Oldest = 0
	if diff := cmp.Diff(outbox.Stats{Pending: 2, PendingExact: true, DeferredExact: true, DeadExact: true, ScheduledExact: true}, s); diff != "" {
		t.Error(diff)
	}
	if _, err := db.Pool.Exec(t.Context(), `insert into commitbox.outbox_message (message_id, channel, key, topic, payload)
		select gen_random_uuid(), 'default', 'hot', 't', '' from generate_series(1, 10001); analyze commitbox.outbox_message`); err != nil {
		t.Fatal(err)
	}
	s, err = o.Stats(t.Context(), channel)
	must(t, err)
	if s.PendingExact || s.Pending < 10_003 {
		t.Errorf("a shard of 10 001: %+v", s)
	}
}

func TestOperatorRefusesBadInput(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	for field, err := range map[string]error{
		"channel": o.Park(t.Context(), "", "k", ""),
		"key":     o.Park(t.Context(), channel, strings.Repeat("k", 513), ""),
		"reason":  o.Requeue(t.Context(), channel, uuid.New(), "a\x00b"),
	} {
		if input := (*commitbox.InputError)(nil); !errors.As(err, &input) || input.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	if _, err := outbox.NewOperator(nil, "Bad"); err == nil {
		t.Error("no pool and a bad schema are accepted")
	}
}
