package outbox_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

func TestH4_ABatchIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	const size, bound = 512 << 10, 1 << 20
	for i := range 24 {
		enqueue(t, db, outbox.Message{Topic: "t", Key: fmt.Sprint("k", i), Payload: make([]byte, size)})
	}
	var greatest atomic.Int64
	p := &recorder{}
	cfg := brisk()
	cfg.Lanes, cfg.BatchBytes = 1, bound
	start(t, newRelay(t, db.Pool, publisherFunc(func(ctx context.Context, batch []outbox.Record) []error {
		greatest.Store(max(greatest.Load(), int64(len(batch)*size)))
		return p.Publish(ctx, batch)
	}), cfg))
	eventually(t, "24 messages", func() bool { return len(p.payloads()) == 24 })
	if got := greatest.Load(); got > bound+size {
		t.Errorf("a batch had %d bytes, the bound is %d and one message", got, bound)
	}
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
}

func TestA6_AMessageIsInOneLanesHandsAtATime(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var inFlight sync.Map
	p := &recorder{}
	cfg := brisk()
	cfg.Lanes = 4
	start(t, newRelay(t, db.Pool, publisherFunc(func(ctx context.Context, batch []outbox.Record) []error {
		for _, r := range batch {
			if _, twice := inFlight.LoadOrStore(r.Key, true); twice {
				t.Errorf("two messages of key %s are in flight", r.Key)
			}
		}
		time.Sleep(time.Millisecond)
		for _, r := range batch {
			inFlight.Delete(r.Key)
		}
		return p.Publish(ctx, batch)
	}), cfg))
	for i := range 200 {
		enqueue(t, db, message(fmt.Sprint("k", i%10), "x"), message(fmt.Sprint("k", i%10), "y"))
	}
	eventually(t, "400 messages", func() bool { return len(p.payloads()) == 400 })
}

func TestB10_AMessageThatIsAlwaysRefusedLeavesTheOthersAlone(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{fail: failing(errRefused, math.MaxInt, "1")}
	cfg := brisk()
	cfg.MaxAttempts = 3
	for i := range 50 {
		enqueue(t, db, message("", fmt.Sprint(i+1)))
	}
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "2 to 50, and 1 given up", func() bool { return len(p.payloads()) == 49 && tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	if n := len(p.attempts()); n != 52 {
		t.Errorf("%d tries, want 49 and 3", n)
	}
	if n := count(t, db, "select count(*) from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'"); n != 0 {
		t.Errorf("%d transactions left open", n)
	}
}

// The producer's half of where duplicates come from.
func TestA9_ProducerDuplicatesKeepTheirIdentity(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	id := uuid.New()
	once := outbox.Message{ID: id, Topic: "t", Key: "k", Payload: []byte("p")}
	undone := begin(t, db)
	if _, err := outbox.Enqueue(t.Context(), undone, once); err != nil { // rolled back, and tried again
		t.Fatal(err)
	}
	if err := undone.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	enqueue(t, db, once)
	enqueue(t, db, once) // its answer was lost
	eventually(t, "two copies", func() bool { return len(p.payloads()) == 2 })
	if p.sent[0].ID != id || p.sent[1].ID != id {
		t.Errorf("ids %v and %v, want %v twice: the consumer could not tell a copy", p.sent[0].ID, p.sent[1].ID, id)
	}
}

func TestP3_ALostConfirmationIsNotPublishedAgain(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	proxy := testenv.NewProxy(t, db.URL)
	p := &recorder{}
	lost := proxy.CutAfter("DeleteAt")
	start(t, newRelay(t, openPool(t, proxy.URL(t, db.URL)), p, brisk()))
	for i := range 10 {
		enqueue(t, db, message("k", fmt.Sprint(i)))
	}
	eventually(t, "the answer to a delete to be lost", func() bool {
		select {
		case <-lost:
			return true
		default:
			return false
		}
	})
	proxy.Heal()
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
	if diff := cmp.Diff([]string{"0", "1", "2", "3", "4", "5", "6", "7", "8", "9"}, p.payloads()); diff != "" {
		t.Errorf("(-want +published):\n%s", diff)
	}
}

func TestB83_WhatIsEnqueuedWhileTheRelayStopsIsNotLost(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	stop := start(t, newRelay(t, db.Pool, p, brisk()))
	var group sync.WaitGroup
	var stopped atomic.Bool
	var committed atomic.Int32
	for range 10 {
		group.Go(func() {
			for i := 0; !stopped.Load() || i < 5; i++ {
				enqueue(t, db, message("", "x"))
				committed.Add(1)
			}
		})
	}
	time.Sleep(200 * time.Millisecond)
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	stopped.Store(true)
	group.Wait()
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
	if n := len(p.payloads()); n != int(committed.Load()) {
		t.Errorf("%d committed, %d published", committed.Load(), n)
	}
}

// A process that is killed, and what it leaves to the next: its shards are served again within lease and two seconds.
func TestB78_P10_AKilledRelayIsReplacedInTime(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), brokerTable); err != nil {
		t.Fatal(err)
	}
	killed := startProcess(t, db, 0)
	enqueue(t, db, message("k", "1"))
	delivered := func(n int) func() bool {
		return func() bool { return count(t, db, "select count(*) from broker") == n }
	}
	eventually(t, "the first message", delivered(1))
	startProcess(t, db, 0)
	eventually(t, "the second relay to have joined", func() bool { return count(t, db, "select count(*) from commitbox.outbox_relay") == 2 })
	killed.kill()
	started := time.Now()
	for i := range 64 {
		enqueue(t, db, message(fmt.Sprint("k", i), "2"))
	}
	eventually(t, "the messages of all shards", delivered(65))
	if took := time.Since(started); took > time.Second+2*time.Second+2*time.Second { // lease, bound, and this machine
		t.Errorf("served again after %v", took)
	}
}

// A relay that was killed comes back and gets its share of the shards, while messages flow: nothing is lost, and what was
// published twice is at most what the killed one had in flight.
func TestP10_AKilledRelayThatReturnsGetsItsShareBack(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), brokerTable); err != nil {
		t.Fatal(err)
	}
	shares := func(want ...int) func() bool {
		return func() bool {
			got := owned(t, db, channel)
			slices.Sort(got)
			return slices.Equal(want, got)
		}
	}
	startProcess(t, db, 0)
	killed := startProcess(t, db, 0)
	eventually(t, "two relays to share the shards", shares(32, 32))
	var done atomic.Bool
	var writing sync.WaitGroup
	sent := 0
	writing.Go(func() {
		for ; !done.Load(); sent += 64 {
			var messages []outbox.Message
			for i := range 64 {
				messages = append(messages, message(fmt.Sprint("k", i), fmt.Sprint(sent)))
			}
			enqueue(t, db, messages...)
		}
	})
	eventually(t, "messages to flow", func() bool { return count(t, db, "select count(*) from broker") > 1000 })
	killed.kill()
	eventually(t, "the other one to own all shards", shares(64))
	startProcess(t, db, 0)
	eventually(t, "the shards to be shared again", shares(32, 32))
	done.Store(true)
	writing.Wait()
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
	distinct, all := count(t, db, "select count(distinct (key, payload)) from broker"), count(t, db, "select count(*) from broker")
	t.Logf("%d messages, %d copies", sent, all-distinct)
	if distinct != sent {
		t.Errorf("%d of %d messages arrived", distinct, sent)
	}
	if all-distinct > childLanes*childBatch {
		t.Errorf("%d copies, at most %d were in flight", all-distinct, childLanes*childBatch)
	}
}
