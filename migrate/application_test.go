package migrate_test

import (
	"database/sql"
	"fmt"
	"sync"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// application is a program that uses goose's globals: default table, versions of its own from 1.
func application(t *testing.T, db *testenv.DB) *sql.DB {
	t.Helper()
	files := fstest.MapFS{}
	for v := 1; v <= 6; v++ {
		files[fmt.Sprintf("%05d_app.sql", v)] = &fstest.MapFile{
			Data: fmt.Appendf(nil, "-- +goose Up\ncreate table app_%d ();\n-- +goose Down\ndrop table app_%d;\n", v, v),
		}
	}
	goose.SetBaseFS(files)
	goose.SetLogger(goose.NopLogger())
	if err := goose.SetDialect("postgres"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { goose.SetBaseFS(nil) })
	handle := stdlib.OpenDBFromPool(db.Pool)
	t.Cleanup(func() { handle.Close() })
	return handle
}

// The package's globals belong to the application, so this test does not run beside others of the package.
func TestB56_TheApplicationsGooseHistoryIsItsOwn(t *testing.T) {
	db := testenv.EmptyDatabase(t)
	app, table := application(t, db), goose.TableName()
	appUp := func(version int64) {
		t.Helper()
		if err := goose.UpTo(app, ".", version); err != nil {
			t.Fatal(err)
		}
	}
	appUp(1)
	up(t, db, true, migrate.Config{})
	appUp(2)
	if err := migrate.Down(t.Context(), db.Pool, migrate.Config{}); err != nil {
		t.Fatal(err)
	}
	appUp(3)
	var group sync.WaitGroup
	group.Go(func() {
		if err := migrate.Up(t.Context(), db.Pool, migrate.Config{}); err != nil {
			t.Error(err)
		}
	})
	appUp(6)
	group.Wait()

	checkHistory(t, db)
	got := query[int64](t, db, "select version_id from goose_db_version order by id")
	if diff := cmp.Diff([]int64{0, 1, 2, 3, 4, 5, 6}, got); diff != "" {
		t.Errorf("the application's history (-want +got):\n%s", diff)
	}
	if n := query[int64](t, db, "select count(*) from pg_tables where schemaname = 'public' and tablename like 'app_%'"); n[0] != 6 {
		t.Errorf("%d of 6 tables of the application", n[0])
	}
	if goose.TableName() != table {
		t.Errorf("goose.TableName() is %q, was %q", goose.TableName(), table)
	}
}

// An application whose globals name another table, and whose own migrations are registered in Go, is not disturbed either.
func TestB56_GlobalsOfTheApplicationAreNotUsed(t *testing.T) {
	table := goose.TableName()
	goose.SetTableName("app_history")
	t.Cleanup(func() { goose.SetTableName(table) })
	registered := goose.NewGoMigration(99, nil, nil)
	if err := goose.SetGlobalMigrations(registered); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(goose.ResetGlobalMigrations)
	db := testenv.EmptyDatabase(t)
	up(t, db, true, migrate.Config{})
	checkHistory(t, db)
	if n := query[int64](t, db, "select count(*) from pg_tables where tablename = 'app_history'"); n[0] != 0 {
		t.Error("the application's table was used")
	}
}
