package flowtest_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
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
			if n := count(t, db, `select count(*) from pg_locks
				where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())`); n != 0 {
				t.Errorf("%d advisory locks are left in the pooler", n)
			}
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

// Nothing waits for a notice, which would not come through the pooler: a running relay finds messages by looking.
func TestB64_MessagesFlowThroughThePoolerWithoutNotices(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	pool := connect(t, db.Bouncer(t), pgx.QueryExecModeExec)
	i, k := install(t, pool, ""), new(keeper)
	relay := i.relay(t, k)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- relay.Run(ctx) }()
	for round := 1; round <= 5; round++ {
		i.enqueue(t, messages)
		eventually(t, "a round of messages", func() bool { return len(k.messages()) >= round*len(messages) })
		time.Sleep(150 * time.Millisecond) // the relay falls back to its slowest interval
	}
	if n := count(t, db, `select count(*) from pg_stat_activity where datname = current_database() and query ilike 'listen%'`); n != 0 {
		t.Error("a session has asked for notices")
	}
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
