package migrate_test

import (
	"context"
	"os"
	osexec "os/exec"
	"strings"
	"testing"
	"time"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// execMode makes a URL fit for a transaction pooler.
func execMode(url string) string {
	separator := "?"
	if strings.Contains(url, "?") {
		separator = "&"
	}
	return url + separator + "default_query_exec_mode=exec"
}

func rounds() int {
	if os.Getenv("COMMITBOX_SOAK") != "" {
		return 20
	}
	return 3
}

func TestB55_TwentyMigratorsOnAnEmptyDatabase(t *testing.T) {
	t.Parallel()
	for range rounds() {
		db := testenv.EmptyDatabase(t)
		if err := upFrom(t, db.URL, 20); err != nil {
			t.Fatal(err)
		}
		checkHistory(t, db)
	}
}

func TestB55_TwentyMigratorsThroughATransactionPooler(t *testing.T) {
	t.Parallel()
	for range rounds() {
		db := testenv.EmptyDatabase(t)
		if err := upFrom(t, execMode(db.Bouncer(t)), 20); err != nil {
			t.Fatal(err)
		}
		checkHistory(t, db)
		checkNoAdvisoryLocks(t, db)
	}
}

// The migrator chooses a mode that works behind a pooler, whatever the client's is.
func TestB62_MigratorsLeaveNoLockInThePooler(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	for _, mode := range []string{"exec", "simple_protocol", "cache_describe", "cache_statement"} {
		url := strings.Replace(execMode(db.Bouncer(t)), "mode=exec", "mode="+mode, 1)
		if err := upFrom(t, url, 6); err != nil {
			t.Fatalf("mode %s: %v", mode, err)
		}
		checkHistory(t, db)
		checkNoAdvisoryLocks(t, db)
		if err := migrate.Down(t.Context(), db.Pool, migrate.Config{}); err != nil {
			t.Fatalf("a direct client after mode %s: %v", mode, err)
		}
	}
	if err := upFrom(t, db.URL, 1); err != nil {
		t.Fatal(err)
	}
	checkHistory(t, db)
}

// blockedMigrator starts a process that migrates and waits until it hangs in its last migration, with the migrators'
// lock held and its tables made but not committed. unblock lets sessions that hang there go on.
func blockedMigrator(t *testing.T, db *testenv.DB) (migrator *osexec.Cmd, unblock func()) {
	t.Helper()
	if err := upFrom(t, db.URL, 1); err != nil {
		t.Fatal(err)
	}
	if err := migrate.Down(t.Context(), db.Pool, migrate.Config{}); err != nil {
		t.Fatal(err)
	}
	unblock = holdVersions(t, db)
	migrator = osexec.Command(os.Args[0])
	migrator.Env = append(os.Environ(), childURL+"="+db.URL)
	if err := migrator.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = migrator.Process.Kill()
		_ = migrator.Wait()
	})
	waitForBlocked(t, db)
	return migrator, unblock
}

// holdVersions keeps others from recording a version until release is called.
func holdVersions(t *testing.T, db *testenv.DB) (release func()) {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(t.Context()) })
	if _, err := tx.Exec(t.Context(), "lock table commitbox.goose_version in share mode"); err != nil {
		t.Fatal(err)
	}
	return func() { _ = tx.Rollback(t.Context()) }
}

func waitForBlocked(t *testing.T, db *testenv.DB) {
	t.Helper()
	eventually(t, "a migrator that waits for the version table", func() bool {
		n := query[int64](t, db, "select count(*) from pg_locks where not granted and relation = 'commitbox.goose_version'::regclass")
		return n[0] == 1
	})
}

func TestB55_AKilledMigratorDoesNotStopTheRest(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	victim, unblock := blockedMigrator(t, db)
	done := make(chan error, 1)
	go func() { done <- upFrom(t, db.URL, 5) }()
	if err := victim.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = victim.Wait() // killed, as it says
	unblock()
	if left := query[bool](t, db, "select lease_until > clock_timestamp() from commitbox.migration_lock"); len(left) != 1 || !left[0] {
		t.Errorf("the victim's lock: %v, want one with time left", left)
	}
	exec(t, db, "update commitbox.migration_lock set lease_until = clock_timestamp() - interval '1 second'")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	checkHistory(t, db)
}

// A migrator whose lock has gone to another stops, and leaves nothing half applied.
func TestMigratorThatLosesItsLockStops(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	if err := upFrom(t, db.URL, 1); err != nil {
		t.Fatal(err)
	}
	if err := migrate.Down(t.Context(), db.Pool, migrate.Config{}); err != nil {
		t.Fatal(err)
	}
	unblock := holdVersions(t, db)
	done := make(chan error, 1)
	go func() { done <- upFrom(t, db.URL, 1) }()
	waitForBlocked(t, db)
	exec(t, db, "update commitbox.migration_lock set owner = gen_random_uuid()")
	select {
	case err := <-done:
		if err == nil || !strings.Contains(err.Error(), "lock was lost; run again") {
			t.Errorf("Up without its lock: %v", err)
		}
	case <-time.After(time.Minute):
		t.Fatal("Up goes on without its lock")
	}
	unblock()
	last := query[int64](t, db, "select max(version_id) from commitbox.goose_version")
	if want := versions(t)[newest(t)-1]; last[0] != want {
		t.Errorf("version %d is recorded, want %d", last[0], want)
	}
	if owners := query[int64](t, db, "select count(*) from commitbox.migration_lock"); owners[0] != 1 {
		t.Error("the other's lock was taken away")
	}
}

// Up gives up waiting when its context ends, and says for what it waited.
func TestUpWaitsForAnotherMigratorUntilItsContextEnds(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	exec(t, db, "insert into commitbox.migration_lock values (1, gen_random_uuid(), clock_timestamp() + interval '1 hour')")
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	err := migrate.Up(ctx, db.Pool, migrate.Config{})
	if err == nil || !strings.Contains(err.Error(), "another migrator") || ctx.Err() == nil {
		t.Errorf("Up: %v", err)
	}
}
