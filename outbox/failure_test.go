package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

var errRefused = errors.New("refused")

// failing answers err for the payloads until each was tried times times.
func failing(err error, times int, payloads ...string) func(outbox.Record) error {
	tried := map[string]int{}
	return func(r outbox.Record) error {
		if !slices.Contains(payloads, string(r.Payload)) {
			return nil
		}
		if tried[string(r.Payload)]++; tried[string(r.Payload)] > times {
			return nil
		}
		return err
	}
}

func TestB20_B21_AFailingMessageHoldsItsKeyAndNoOther(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{fail: failing(errRefused, 2, "a1")}
	enqueue(t, db, message("a", "a1"), message("a", "a2"), message("b", "b1"), message("", "loose"), message("a", "a3"))
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "b1 and the loose message", func() bool {
		got := p.payloads()
		return slices.Contains(got, "b1") && slices.Contains(got, "loose")
	})
	enqueue(t, db, message("a", "a4"), message("b", "b2"))
	eventually(t, "everything", func() bool { return len(p.payloads()) == 7 })
	if diff := cmp.Diff([]string{"a1", "a1", "a1", "a2", "a3", "a4"}, p.attempts("a")); diff != "" {
		t.Errorf("what was tried of key a:\n%s", diff)
	}
	if diff := cmp.Diff([]string{"b1", "b2"}, p.attempts("b")); diff != "" {
		t.Errorf("what was tried of key b:\n%s", diff)
	}
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
}

func TestB08_APoisonMessageIsParkedAndCostsNobodyElse(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{fail: failing(errRefused, math.MaxInt, "poison")}
	cfg := brisk()
	cfg.Batch, cfg.MaxAttempts = 10, 4
	enqueue(t, db, message("", "poison"))
	for i := range 100 {
		enqueue(t, db, message("", fmt.Sprint(i)))
	}
	started := time.Now()
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "100 good messages", func() bool { return len(p.payloads()) == 100 })
	eventually(t, "the poison to be dead", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	if n := len(p.attempts()) - 100; n != 4 {
		t.Errorf("the poison was tried %d times, want 4", n)
	}
	if least := 3 * cfg.BackoffBase / 2; time.Since(started) < least {
		t.Errorf("4 attempts took less than the %v of their delays", least)
	}
	var attempts int
	var reason string
	if err := db.Pool.QueryRow(t.Context(), "select attempts, last_error from commitbox.outbox_dead").Scan(&attempts, &reason); err != nil {
		t.Fatal(err)
	}
	if attempts != 4 || reason != "refused" {
		t.Errorf("dead row says %d attempts and %q", attempts, reason)
	}
}

func TestB08_AnOutageSpendsNoAttempt(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var away atomic.Bool
	away.Store(true)
	p := &recorder{fail: func(outbox.Record) error {
		if away.Load() {
			return outbox.Unavailable(errors.New("connection refused"))
		}
		return nil
	}}
	cfg := brisk()
	cfg.MaxAttempts = 2
	for i := range 20 {
		enqueue(t, db, message(fmt.Sprint("k", i%3), fmt.Sprint(i)))
	}
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "several tries", func() bool { return len(p.attempts()) > 20 })
	if got := tables(t, db); got != "hot 20, deferred 0, dead 0, blocked 0" {
		t.Errorf("during the outage: %s", got)
	}
	away.Store(false)
	eventually(t, "all messages", func() bool { return len(p.payloads()) == 20 })
	for _, r := range p.sent {
		if r.Attempt != 1 {
			t.Errorf("message %s was published as attempt %d: the outage counted", r.Payload, r.Attempt)
		}
	}
}

func TestB09_ABrokenRowIsParkedAndTheBatchGoesOn(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	enqueue(t, db, message("k", "1"))
	// Behind the constraint's back, as a restore or an older version might leave it.
	if _, err := db.Pool.Exec(t.Context(), `alter table commitbox.outbox_message disable trigger outbox_check;
		insert into commitbox.outbox_message (message_id, shard, channel, key, topic, headers, payload)
		values (gen_random_uuid(), commitbox.outbox_shard_of('k'), 'default', 'k', 't', '{"a": {"b": 1}}', 'broken');
		alter table commitbox.outbox_message enable trigger outbox_check`); err != nil {
		t.Fatal(err)
	}
	enqueue(t, db, message("k", "2"), message("other", "3"))
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "the good ones", func() bool { return len(p.payloads()) == 3 })
	eventually(t, "the broken one", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	if diff := cmp.Diff([]string{"1", "2"}, p.payloads("k")); diff != "" {
		t.Error(diff)
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_dead where last_error like 'headers are not%'"); n != 1 {
		t.Error("the dead row does not say why")
	}
}

func TestAPermanentErrorIsDeadAtOnce(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{fail: failing(outbox.Permanent(errRefused), math.MaxInt, "bad")}
	enqueue(t, db, message("k", "bad"), message("k", "next"))
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "the next of its key", func() bool { return len(p.payloads("k")) == 1 })
	eventually(t, "the dead one", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	if diff := cmp.Diff([]string{"bad", "next"}, p.attempts("k")); diff != "" {
		t.Error(diff)
	}
}

func TestADeadMessageHoldsItsKeyUntilItIsRequeued(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{fail: failing(errRefused, 2, "a1")}
	cfg := brisk()
	cfg.MaxAttempts = 2
	if _, err := db.Pool.Exec(t.Context(), "insert into commitbox.outbox_channel values ('default', 'hold')"); err != nil {
		t.Fatal(err)
	}
	ids := enqueue(t, db, message("a", "a1"), message("a", "a2"), message("b", "b1"))
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "a1 to be dead", func() bool { return tables(t, db) == "hot 0, deferred 1, dead 1, blocked 1" })
	enqueue(t, db, message("a", "a3"), message("b", "b2"))
	eventually(t, "b2", func() bool { return len(p.payloads("b")) == 2 })
	if got := p.attempts("a"); len(got) != 2 {
		t.Fatalf("key a went on behind its dead message: %v", got)
	}
	var requeued bool
	if err := db.Pool.QueryRow(t.Context(), "select commitbox.outbox_requeue('default', $1, 'repaired')", ids[0].String()).Scan(&requeued); err != nil || !requeued {
		t.Fatalf("requeue: %v, %v", requeued, err)
	}
	eventually(t, "key a", func() bool { return len(p.payloads("a")) == 3 })
	if diff := cmp.Diff([]string{"a1", "a2", "a3"}, p.payloads("a")); diff != "" {
		t.Error(diff)
	}
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
}

func TestADeadHeadLetsItsKeyGoOn(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{fail: failing(errRefused, 2, "a1")}
	cfg := brisk()
	cfg.MaxAttempts = 2
	ids := enqueue(t, db, message("a", "a1"), message("a", "a2"), message("a", "a3"))
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "the followers", func() bool { return len(p.payloads("a")) == 2 })
	eventually(t, "a1 to be dead", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	if _, err := db.Pool.Exec(t.Context(), "select commitbox.outbox_requeue('default', $1)", ids[0].String()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a1", func() bool { return len(p.payloads("a")) == 3 })
	if diff := cmp.Diff([]string{"a2", "a3", "a1"}, p.payloads("a")); diff != "" {
		t.Error(diff)
	}
}

// misbehaving does one odd thing per call, then works.
type misbehaving struct {
	recorder
	calls atomic.Int32
}

func (p *misbehaving) Publish(ctx context.Context, batch []outbox.Record) []error {
	switch p.calls.Add(1) {
	case 1:
		panic("publisher bug")
	case 2:
		runtime.Goexit()
	case 3:
		return nil
	case 4:
		return make([]error, len(batch)+1)
	case 5:
		panic(errRefused)
	}
	return p.recorder.Publish(ctx, batch)
}

func TestA2_B73_WhatAPublisherDoesWrongIsNeverAConfirmation(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &misbehaving{}
	enqueue(t, db, message("k", "1"), message("k", "2"))
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "both messages", func() bool { return len(p.payloads()) == 2 })
	if diff := cmp.Diff([]string{"1", "2"}, p.payloads()); diff != "" {
		t.Error(diff)
	}
	if got := p.sent[0].Attempt; got != 6 {
		t.Errorf("the first message was confirmed at attempt %d, want 6: each misdeed counts once", got)
	}
}

func TestB16_TheRetryPaceDoesNotDependOnTheNumberOfRelays(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var tried atomic.Int32
	cfg := brisk()
	cfg.BackoffBase, cfg.BackoffMax = time.Second, time.Second
	for range 6 {
		start(t, newRelay(t, db.Pool, outbox.PublishFunc(func(context.Context, outbox.Record) error {
			tried.Add(1)
			return errRefused
		}), cfg))
	}
	enqueue(t, db, message("k", "fails"))
	eventually(t, "the first try", func() bool { return tried.Load() > 0 })
	time.Sleep(3 * time.Second)
	if n := tried.Load(); n < 3 || n > 7 {
		t.Errorf("tried %d times in 3 s with delays of 0.5 to 1 s", n)
	}
}
