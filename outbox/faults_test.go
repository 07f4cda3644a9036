package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// misjudging is a publisher that keeps the order of keys and fails whole batches in one of the ways that the contract allows.
type misjudging struct {
	recorder
	bad   func(batch []outbox.Record) []error
	calls atomic.Int32
}

func (p *misjudging) StopsKeyAtFirstFailure() bool { return true }

func (p *misjudging) Publish(ctx context.Context, batch []outbox.Record) []error {
	if p.calls.Add(1) <= 2 {
		return p.bad(batch)
	}
	return p.recorder.Publish(ctx, batch)
}

func TestAWholeBatchThatFailsCountsOnceForEachKey(t *testing.T) {
	t.Parallel()
	for name, bad := range map[string]func([]outbox.Record) []error{
		"panic": func([]outbox.Record) []error { panic("publisher bug") },
		"short": func([]outbox.Record) []error { return nil },
		"refused": func(batch []outbox.Record) []error {
			return slices.Repeat([]error{errRefused}, len(batch))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := testenv.Database(t)
			p := &misjudging{bad: bad}
			enqueue(t, db, message("k", "1"), message("k", "2"), message("k", "3"))
			start(t, newRelay(t, db.Pool, p, brisk()))
			eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
			if diff := cmp.Diff([]string{"1", "2", "3"}, p.payloads()); diff != "" {
				t.Error(diff)
			}
			if got := p.sent[0].Attempt; got != 3 {
				t.Errorf("the first message was confirmed at attempt %d, want 3", got)
			}
		})
	}
}

type unspeakable struct{ text string }

func (u *unspeakable) Error() string { return u.text } // panics for a nil pointer

func TestH2_AnErrorThatPanicsIsAFailure(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	var failed atomic.Bool
	start(t, newRelay(t, db.Pool, outbox.PublishFunc(func(ctx context.Context, r outbox.Record) error {
		if failed.CompareAndSwap(false, true) {
			return (*unspeakable)(nil)
		}
		return p.Publish(ctx, []outbox.Record{r})[0]
	}), brisk()))
	enqueue(t, db, message("k", "1"))
	eventually(t, "the second attempt", func() bool { return len(p.payloads()) == 1 })
}

func TestALaneThatLosesItsLastShardGoesOn(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	enqueue(t, db, message("k", "1"))
	cfg := brisk()
	cfg.Lanes, cfg.BackoffBase, cfg.BackoffMax = 64, 100*time.Millisecond, 100*time.Millisecond // one shard for each lane
	var tries atomic.Int32
	start(t, newRelay(t, db.Pool, outbox.PublishFunc(func(context.Context, outbox.Record) error {
		if n := tries.Add(1); n > 5 {
			return nil
		}
		if err := o.Retry(context.Background(), channel, "k", ""); err != nil && !errors.Is(err, outbox.ErrNotFound) {
			t.Error(err) // the epoch changes under the try: its failure finds the shard lost
		}
		return errRefused
	}), cfg))
	eventually(t, "the message", func() bool { return tables(t, db) == settled })
}

func TestH3_RunOnceHandsNothingOverAfterAStall(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	enqueue(t, db, message("k", "1"))
	release := make(chan struct{})
	defer close(release)
	relay := newRelay(t, db.Pool, outbox.PublishFunc(func(context.Context, outbox.Record) error { <-release; return nil }), brisk())
	if _, err := relay.RunOnce(t.Context()); !errors.Is(err, outbox.ErrPublishStalled) {
		t.Fatalf("RunOnce: %v", err)
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_shard where owner is not null"); n != 64 {
		t.Errorf("%d shards are still owned, want 64: the call may still send", n)
	}
}

func TestP2_AConfirmationDeletesNoOtherMessageAtItsPosition(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	proxy := testenv.NewProxy(t, db.URL)
	var once sync.Once
	p := &recorder{fail: func(outbox.Record) error {
		once.Do(func() { // the server is gone once the broker has confirmed
			proxy.Refuse(true)
			proxy.Cut()
		})
		return nil
	}}
	cfg := brisk()
	cfg.Lease = time.Minute
	start(t, newRelay(t, openPool(t, proxy.URL(t, db.URL)), p, cfg))
	eventually(t, "the relay to own its shards", func() bool { return slices.Equal(owned(t, db, channel), []int{64}) })
	enqueue(t, db, message("k", "lost"))
	eventually(t, "the first message", func() bool { return len(p.payloads()) == 1 })
	// Another server answers: it has lost the commit, and draws the position again.
	if _, err := db.Pool.Exec(t.Context(), "delete from commitbox.outbox_message; select setval('commitbox.outbox_seq', 1, false)"); err != nil {
		t.Fatal(err)
	}
	enqueue(t, db, message("k", "second"))
	proxy.Refuse(false)
	eventually(t, "the message that took the position", func() bool { return slices.Contains(p.payloads(), "second") })
}

func TestAPositionDrawnAgainBesideADeadMessage(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{fail: func(r outbox.Record) error {
		if string(r.Payload) == "bad" {
			return outbox.Permanent(errRefused)
		}
		return nil
	}}
	start(t, newRelay(t, db.Pool, p, brisk()))
	enqueue(t, db, message("k", "bad"))
	eventually(t, "a dead message", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	if _, err := db.Pool.Exec(t.Context(), "select setval('commitbox.outbox_seq', 1, false)"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(200 * time.Millisecond) // another server is noticed by its connections; this one by its positions
	enqueue(t, db, message("k", "bad"), message("k", "good"))
	eventually(t, "the good one behind it", func() bool { return len(p.payloads()) == 1 })
	eventually(t, "two dead ones", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 2, blocked 0" })
}

func TestAnOpenTransactionOnTheChannelCostsNoLease(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "the relay to own its shards", func() bool { return slices.Equal(owned(t, db, channel), []int{64}) })
	owner := func() (owner string) {
		must(t, db.Pool.QueryRow(t.Context(), "select owner::text from commitbox.outbox_shard where shard = 0").Scan(&owner))
		return owner
	}
	first := owner()
	tx := begin(t, db)
	if _, err := tx.Exec(t.Context(), "update commitbox.outbox_channel set dead_policy = 'hold'"); err != nil {
		t.Fatal(err)
	}
	// A peer has died: its removal waits for the channel's row.
	if _, err := db.Pool.Exec(t.Context(), "insert into commitbox.outbox_relay values (gen_random_uuid(), 'default', now(), now() - interval '1 s')"); err != nil {
		t.Fatal(err)
	}
	time.Sleep(4 * time.Second) // twice the lease
	enqueue(t, db, message("k", "1"))
	eventually(t, "the message", func() bool { return len(p.payloads()) == 1 })
	if owner() != first {
		t.Error("the relay lost its lease")
	}
}

func TestAMissingShardIsMadeAnew(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	enqueue(t, db, message("k", "1"))
	eventually(t, "the first message", func() bool { return len(p.payloads()) == 1 })
	if _, err := db.Pool.Exec(t.Context(), "delete from commitbox.outbox_shard where shard = commitbox.outbox_shard_of('k')"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the shard row", func() bool {
		return count(t, db, "select count(*) from commitbox.outbox_shard where owner is not null") == 64
	})
	if n := count(t, db, `select count(*) from commitbox.outbox_shard o where o.epoch >= (
		select s.epoch from commitbox.outbox_shard s where s.shard = commitbox.outbox_shard_of('k'))`); n != 1 {
		t.Errorf("%d shards have an epoch that is not older than that of the new row", n)
	}
	enqueue(t, db, message("k", "2"))
	eventually(t, "the second message", func() bool { return len(p.payloads()) == 2 })
}

func TestP3_H4_DeferredMessagesComeInBoundedBatches(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	const size = 100 << 10
	for i := range 64 {
		var batch []outbox.Message
		for range 4 {
			batch = append(batch, outbox.Message{Topic: "t", Key: fmt.Sprint("k", i), Payload: make([]byte, size)})
		}
		enqueue(t, db, batch...)
	}
	cfg := brisk()
	cfg.Lanes, cfg.Batch, cfg.BatchBytes, cfg.BackoffBase, cfg.BackoffMax = 1, 10, 5*size, time.Hour, time.Hour
	stop := start(t, newRelay(t, db.Pool, outbox.PublishFunc(func(context.Context, outbox.Record) error { return errRefused }), cfg))
	eventuallyWithin(t, time.Minute, "all to be deferred", func() bool { return tables(t, db) == "hot 0, deferred 256, dead 0, blocked 64" })
	must(t, stop())
	if _, err := db.Pool.Exec(t.Context(), "update commitbox.outbox_blocked set due_at = now()"); err != nil {
		t.Fatal(err)
	}
	var confirmed, most atomic.Int64
	start(t, newRelay(t, db.Pool, publisherFunc(func(_ context.Context, batch []outbox.Record) []error {
		deleted := 256 - count(t, db, "select count(*) from commitbox.outbox_deferred")
		most.Store(max(most.Load(), confirmed.Add(int64(len(batch)))-int64(deleted)))
		return make([]error, len(batch))
	}), cfg))
	eventuallyWithin(t, time.Minute, "empty tables", func() bool { return tables(t, db) == settled })
	if n := most.Load(); n > 6 {
		t.Errorf("%d messages were confirmed and not deleted, of which 6 reach the bound in bytes", n)
	}
}

func TestP10_H7_APageOfAnAbsentTopicHidesNoOther(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for i := range 300 {
		enqueue(t, db, outbox.Message{Topic: "away", Key: fmt.Sprint("a", i)})
	}
	for i := range 20 {
		enqueue(t, db, outbox.Message{Topic: "there", Key: fmt.Sprint("t", i), Payload: []byte("there")})
	}
	p := &recorder{}
	cfg := brisk()
	cfg.Batch = 64
	start(t, newRelay(t, db.Pool, publisherFunc(func(ctx context.Context, batch []outbox.Record) []error {
		errs := p.Publish(ctx, batch)
		for i, r := range batch {
			if r.Topic == "away" {
				errs[i] = outbox.Unavailable(errors.New("no such exchange"))
			}
		}
		return errs
	}), cfg))
	there := func() (n int) {
		for _, payload := range p.payloads() {
			if payload == "there" {
				n++
			}
		}
		return n
	}
	eventually(t, "the topic that is there", func() bool { return there() >= 20 })
}

func TestOperatorMovesTheMessageThatHoldsItsKey(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	keeping(t, db, 0)
	if _, err := db.Pool.Exec(t.Context(), "update commitbox.outbox_channel set dead_policy = 'hold'"); err != nil {
		t.Fatal(err)
	}
	s := refusing("1", "3")
	p := &recorder{fail: s.fail}
	cfg := brisk()
	cfg.MaxAttempts = 1
	start(t, newRelay(t, db.Pool, p, cfg))
	ids := enqueue(t, db, message("k", "1"), message("k", "2"), message("k", "3"), message("k", "4"))
	eventually(t, "1 to hold the key", func() bool { return tables(t, db) == "hot 0, deferred 3, dead 1, blocked 1" })
	head, err := o.SkipHead(t.Context(), channel, "k", "")
	must(t, err)
	eventually(t, "3 to hold the key", func() bool { return tables(t, db) == "hot 0, deferred 1, dead 2, blocked 1" })
	if head != ids[0] {
		t.Errorf("skipped %v, want %v", head, ids[0])
	}
	keys, err := o.Blocked(t.Context(), channel, "", 0)
	must(t, err)
	if len(keys) != 1 || keys[0].Head != ids[2] || keys[0].Reason != "dead" {
		t.Errorf("blocked: %+v", keys)
	}
	s.accept()
	must(t, o.Requeue(t.Context(), channel, ids[2], "")) // the one that holds it, although an older dead one is there
	eventually(t, "3 and 4 in order", func() bool { return len(p.payloads("k")) == 3 })
	must(t, o.Requeue(t.Context(), channel, ids[0], ""))
	eventually(t, "1 at the end", func() bool { return len(p.payloads("k")) == 4 })
	if diff := cmp.Diff([]string{"2", "3", "4", "1"}, p.payloads("k")); diff != "" {
		t.Error(diff)
	}
}
