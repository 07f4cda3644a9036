package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

func TestB01_FiveRelaysPublishEachMessageOnce(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	slow := publisherFunc(func(ctx context.Context, batch []outbox.Record) []error {
		time.Sleep(300 * time.Millisecond)
		return p.Publish(ctx, batch)
	})
	for i := range 20 {
		enqueue(t, db, message(fmt.Sprint("k", i%4), fmt.Sprint(i)))
	}
	for range 5 {
		start(t, newRelay(t, db.Pool, slow, brisk()))
	}
	for i := range 20 {
		enqueue(t, db, message(fmt.Sprint("k", i%4), fmt.Sprint(20+i)))
	}
	eventually(t, "40 messages", func() bool { return len(p.payloads()) >= 40 })
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
	if n := len(p.payloads()); n != 40 {
		t.Errorf("%d publishes of 40 messages", n)
	}
}

type publisherFunc func(context.Context, []outbox.Record) []error

func (f publisherFunc) Publish(ctx context.Context, batch []outbox.Record) []error {
	return f(ctx, batch)
}

func TestP15_AStoppedRelayHandsOverAtOnce(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	cfg := brisk()
	cfg.Lease = time.Hour // a takeover after a crash would take an hour
	cfg.Renew, cfg.RenewTimeout, cfg.PublishTimeout, cfg.Guard = 100*time.Millisecond, time.Second, time.Second, 100*time.Millisecond
	first, second := &recorder{}, &recorder{}
	stopFirst := start(t, newRelay(t, db.Pool, first, cfg))
	enqueue(t, db, message("k", "1"))
	eventually(t, "the first relay's message", func() bool { return len(first.payloads()) == 1 })
	start(t, newRelay(t, db.Pool, second, cfg))
	if err := stopFirst(); err != nil {
		t.Fatal(err)
	}
	enqueue(t, db, message("k", "2"))
	eventually(t, "the second relay's message", func() bool { return len(second.payloads()) == 1 })
	if n := len(first.payloads()); n != 1 {
		t.Errorf("the first relay published %d messages, want 1", n)
	}
}

func TestP15_StopWaitsForThePublishUnderWayAndSettlesIt(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	under, p := make(chan struct{}), &recorder{}
	slow := publisherFunc(func(ctx context.Context, batch []outbox.Record) []error {
		close(under)
		time.Sleep(200 * time.Millisecond)
		if ctx.Err() != nil {
			t.Error("the call under way was cut short")
		}
		return p.Publish(ctx, batch)
	})
	enqueue(t, db, message("k", "1"))
	stop := start(t, newRelay(t, db.Pool, slow, brisk()))
	<-under
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if got := tables(t, db); got != settled || len(p.payloads()) != 1 {
		t.Errorf("after the stop: %s, %d published", got, len(p.payloads()))
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_relay"); n != 0 {
		t.Errorf("%d lease rows left", n)
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_shard where owner is not null"); n != 0 {
		t.Errorf("%d shards still owned", n)
	}
}

func TestB06_NoTransactionIsOpenWhileTheBrokerWorks(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	under, release := make(chan struct{}), make(chan struct{})
	start(t, newRelay(t, db.Pool, outbox.PublishFunc(func(context.Context, outbox.Record) error {
		close(under)
		<-release
		return nil
	}), brisk()))
	enqueue(t, db, message("k", "1"))
	<-under
	time.Sleep(300 * time.Millisecond)
	open := count(t, db, `select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
		and (state like 'idle in transaction%' or xact_start < clock_timestamp() - interval '200 ms')`)
	close(release)
	if open != 0 {
		t.Errorf("%d sessions hold a transaction during Publish", open)
	}
}

func TestH3_APublisherThatHangsEndsItsRelayAndAnotherTakesOver(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	enqueue(t, db, message("k", "1"))
	release := make(chan struct{})
	defer close(release)
	hung := newRelay(t, db.Pool, outbox.PublishFunc(func(context.Context, outbox.Record) error {
		<-release // deaf to its context
		return nil
	}), brisk())
	err := hung.Run(t.Context())
	if !errors.Is(err, outbox.ErrPublishStalled) {
		t.Fatalf("Run: %v, want ErrPublishStalled", err)
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_shard where owner is not null"); n == 0 {
		t.Error("the shards were handed over although the call may still send")
	}
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "the message through another relay", func() bool { return len(p.payloads()) == 1 })
}

// A relay that loses the database past its lease: another takes over, the first changes nothing any more and joins anew.
func TestP7_ARelayCutOffPastItsLeaseIsFenced(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	proxy := testenv.NewProxy(t, db.URL)
	first := &recorder{fail: func(r outbox.Record) error { return errRefused }}
	cfg := brisk()
	cfg.BackoffBase, cfg.BackoffMax = time.Minute, time.Minute
	relay := newRelay(t, openPool(t, proxy.URL(t, db.URL)), publisherFunc(func(ctx context.Context, batch []outbox.Record) []error {
		proxy.BlackHole(testenv.ToServer)
		return first.Publish(ctx, batch)
	}), cfg)
	enqueue(t, db, message("k", "1"))
	stop := start(t, relay)
	eventually(t, "the first relay's try", func() bool { return len(first.attempts()) == 1 })
	second := &recorder{}
	start(t, newRelay(t, db.Pool, second, brisk()))
	eventually(t, "the takeover", func() bool { return len(second.payloads()) == 1 })
	proxy.Heal()
	time.Sleep(500 * time.Millisecond)
	if got := tables(t, db); got != settled {
		t.Errorf("the former owner changed something: %s", got)
	}
	if err := stop(); err != nil {
		t.Logf("stop: %v", err)
	}
}

func TestB15_B81_TheRelayOutlivesADatabaseThatIsAwayOrReadOnly(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	proxy := testenv.NewProxy(t, db.URL)
	p := &recorder{}
	start(t, newRelay(t, openPool(t, proxy.URL(t, db.URL)), p, brisk()))
	enqueue(t, db, message("k", "1"))
	eventually(t, "the first message", func() bool { return len(p.payloads()) == 1 })
	proxy.Refuse(true)
	proxy.Cut()
	enqueue(t, db, message("k", "2"))
	time.Sleep(3 * time.Second) // past the lease
	proxy.Refuse(false)
	eventually(t, "the second message", func() bool { return slices.Contains(p.payloads(), "2") })

	// The sessions of the relay come back to a server that has become read-only, and later is not.
	admin, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer admin.Release()
	exec := func(sql string) {
		t.Helper()
		if _, err := admin.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	const endOthers = "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
	exec("alter database " + db.Name + " set default_transaction_read_only = on")
	exec(endOthers)
	time.Sleep(3 * time.Second)
	exec("alter database " + db.Name + " reset default_transaction_read_only")
	exec(endOthers)
	db.Pool.Reset()
	enqueue(t, db, message("k", "3"))
	eventually(t, "the third message", func() bool { return slices.Contains(p.payloads(), "3") })
}
