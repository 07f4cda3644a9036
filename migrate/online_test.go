package migrate_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// rows is how full the table is while migrations run.
const rows = 200_000

// stallMax bounds the longest insert. It is generous: a rewrite of the table, and a lock that waits for one, exceed it
// on a large table, and the check of the files' numbers finds one on a small table.
const stallMax = 5 * time.Second

// Running all migrations again on filled tables, as every deployment does, stalls no writer and rewrites no table. The
// files themselves are checked by package migrations: those that exist only make new objects.
func TestB57_MigrationsOnFilledTablesDoNotStallWriters(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	exec(t, db, `insert into commitbox.outbox_message (message_id, channel, topic, payload)
		select gen_random_uuid(), 'default', 't', '\x00' from generate_series(1, $1::int)`, rows)
	exec(t, db, `insert into commitbox.inbox (consumer, message_id, status, finished_at)
		select 'c', n::text, 'completed', now() from generate_series(1, $1::int) n`, rows)
	before := fileNumbers(t, db)
	longest := writeWhile(t, db, func() {
		for range 5 {
			if err := migrate.Up(t.Context(), db.Pool, migrate.Config{}); err != nil {
				t.Error(err)
			}
		}
	})
	if longest > stallMax {
		t.Errorf("a writer was stalled for %v", longest)
	}
	if diff := cmp.Diff(before, fileNumbers(t, db)); diff != "" {
		t.Errorf("tables were rewritten (-before +after):\n%s", diff)
	}
	checkHistory(t, db)
}

// A migrator that waits for another, or runs, holds no lock that a writer meets.
func TestB57_ABlockedMigratorBlocksNoWriter(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	_, unblock := blockedMigrator(t, db)
	defer unblock()
	ctx, cancel := context.WithTimeout(t.Context(), stallMax)
	defer cancel()
	if _, err := db.Pool.Exec(ctx, `insert into commitbox.outbox_message (message_id, channel, topic, payload)
		values (gen_random_uuid(), 'default', 't', '')`); err != nil {
		t.Errorf("enqueue beside a migrator: %v", err)
	}
}

// fileNumbers are the files of all relations in the schema; a rewrite makes a new one.
func fileNumbers(t *testing.T, db *testenv.DB) []string {
	t.Helper()
	return query[string](t, db, `select format('%s %s', relname, relfilenode) from pg_class c join pg_namespace n on n.oid = relnamespace
		where nspname = 'commitbox' order by relname`)
}

// writeWhile inserts from four writers while do runs and returns how long the slowest insert took.
func writeWhile(t *testing.T, db *testenv.DB, do func()) (longest time.Duration) {
	t.Helper()
	var mu sync.Mutex
	var writers sync.WaitGroup
	stop := make(chan struct{})
	for range 4 {
		writers.Go(func() {
			slowest, err := write(t.Context(), db, stop)
			mu.Lock()
			defer mu.Unlock()
			longest = max(longest, slowest)
			if err != nil {
				t.Error(err)
			}
		})
	}
	do()
	close(stop)
	writers.Wait()
	return longest
}

func write(ctx context.Context, db *testenv.DB, stop <-chan struct{}) (slowest time.Duration, err error) {
	for {
		select {
		case <-stop:
			return slowest, nil
		default:
		}
		start := time.Now()
		if _, err := db.Pool.Exec(ctx, `select commitbox.enqueue('t', '\x00')`); err != nil {
			return slowest, err
		}
		slowest = max(slowest, time.Since(start))
	}
}
