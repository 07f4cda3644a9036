package flowtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
	"github.com/commitbox/commitbox/outbox"
)

func emptyWithBusiness(t *testing.T) *testenv.DB {
	t.Helper()
	db := testenv.EmptyDatabase(t)
	if _, err := db.Pool.Exec(t.Context(), business); err != nil {
		t.Fatal(err)
	}
	return db
}

func TestB63_ThroughATransactionPoolerInEveryModeForIt(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := emptyWithBusiness(t)
			pool := connect(t, db.Bouncer(t), mode)
			if err := migrate.Up(t.Context(), pool, migrate.Config{}); err != nil {
				t.Fatal(err)
			}
			install(t, pool, "").checkFlow(t, db)
			checkNoAdvisoryLocks(t, db)
		})
	}
}

func TestB63_DirectlyInEveryMode(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := emptyWithBusiness(t)
			pool := connect(t, db.URL, mode)
			if err := migrate.Up(t.Context(), pool, migrate.Config{}); err != nil {
				t.Fatal(err)
			}
			install(t, pool, "").checkFlow(t, db)
		})
	}
}

func checkNoAdvisoryLocks(t *testing.T, db *testenv.DB) {
	t.Helper()
	if n := count(t, db, `select count(*) from pg_locks
		where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())`); n != 0 {
		t.Errorf("%d advisory locks are left in the pooler", n)
	}
}

// run starts a relay; stop ends it and checks that it handed everything over.
func run(t *testing.T, relay *outbox.Relay) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	return func() {
		t.Helper()
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("relay: %v", err)
			}
		case <-time.After(30 * time.Second):
			t.Error("the relay does not stop")
		}
	}
}

// Relays that join, share and leave through the pooler leave nothing in it, and a direct one takes over at once.
func TestB62_RelaysLeaveNoLockInThePooler(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	k := new(keeper)
	var stops []func()
	for range 6 {
		stops = append(stops, run(t, install(t, connect(t, db.Bouncer(t), pgx.QueryExecModeExec), "").relay(t, k)))
	}
	direct := install(t, db.Pool, "")
	for round := 1; round <= 20; round++ {
		direct.enqueue(t, messages)
		eventually(t, "a round of messages", func() bool { return len(k.messages()) >= round*len(messages) })
	}
	for _, stop := range stops {
		stop()
	}
	checkNoAdvisoryLocks(t, db)
	if n := count(t, db, `select (select count(*) from commitbox.outbox_relay) + (select count(*) from commitbox.outbox_shard where owner is not null)`); n != 0 {
		t.Errorf("%d leases and shards were not handed over", n)
	}
	k = new(keeper)
	direct.enqueue(t, messages)
	direct.relayUntil(t, k, "messages by a direct relay", func() bool { return len(k.messages()) == len(messages) })
}

// Nothing waits for a notice, which would not come through the pooler: a running relay finds messages by looking.
func TestB64_MessagesFlowThroughThePoolerWithoutNotices(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	pool := connect(t, db.Bouncer(t), pgx.QueryExecModeExec)
	i, k := install(t, pool, ""), new(keeper)
	stop := run(t, i.relay(t, k))
	for round := 1; round <= 5; round++ {
		i.enqueue(t, messages)
		eventually(t, "a round of messages", func() bool { return len(k.messages()) >= round*len(messages) })
		time.Sleep(150 * time.Millisecond) // the relay falls back to its slowest interval
	}
	if n := count(t, db, `select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'`); n != 0 {
		t.Error("a session has asked for notices")
	}
	stop()
}
