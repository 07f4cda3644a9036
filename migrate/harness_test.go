package migrate_test

import (
	"context"
	"errors"
	"io/fs"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
	"github.com/commitbox/commitbox/migrations"
)

// newPool returns a pool of its own, as every replica has one.
func newPool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// upFrom calls Up from n clients at once and returns their errors.
func upFrom(t *testing.T, url string, n int) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	errs := make([]error, n)
	var group sync.WaitGroup
	for i := range n {
		pool := newPool(t, url)
		group.Go(func() { errs[i] = migrate.Up(ctx, pool, migrate.Config{}) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// versions lists the versions of the migrations in order, with goose's 0 in front.
func versions(t *testing.T) []int64 {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*.sql")
	if err != nil {
		t.Fatal(err)
	}
	list := []int64{0}
	for _, name := range names {
		number, _, _ := strings.Cut(name, "_")
		version, err := strconv.ParseInt(number, 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, version)
	}
	return list
}

// newest is how many migrations there are.
func newest(t *testing.T) int64 { return int64(len(versions(t)) - 1) }

// query returns a column of one statement.
func query[T any](t *testing.T, db *testenv.DB, sql string, args ...any) []T {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return list
}

func exec(t *testing.T, db *testenv.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// checkHistory checks that every version is recorded once and applied, and that nobody has kept the lock.
func checkHistory(t *testing.T, db *testenv.DB) {
	t.Helper()
	got := query[int64](t, db, "select version_id from commitbox.goose_version where is_applied order by version_id")
	if diff := cmp.Diff(versions(t), got); diff != "" {
		t.Errorf("recorded versions (-want +got):\n%s", diff)
	}
	if locks := query[int64](t, db, "select count(*) from commitbox.migration_lock"); locks[0] != 0 {
		t.Error("the lock was not given back")
	}
}

// checkNoAdvisoryLocks checks that no session of the database holds an advisory lock.
func checkNoAdvisoryLocks(t *testing.T, db *testenv.DB) {
	t.Helper()
	const sql = `select count(*) from pg_locks
		where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())`
	if locks := query[int64](t, db, sql); locks[0] != 0 {
		t.Errorf("%d advisory locks are left behind", locks[0])
	}
}

// eventually waits until ok, for at most 30 s.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited 30 s for: %s", what)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// dropRole removes a role of the whole server.
func dropRole(t *testing.T, db *testenv.DB, role string) {
	t.Helper()
	for _, sql := range []string{"drop owned by " + role, "drop role " + role} {
		if _, err := db.Pool.Exec(context.Background(), sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}
