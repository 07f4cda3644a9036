package testenv_test

import (
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
)

func countSchema(t *testing.T, db *testenv.DB) (n int) {
	t.Helper()
	const sql = `SELECT count(*) FROM pg_namespace WHERE nspname = 'commitbox'`
	if err := db.Pool.QueryRow(t.Context(), sql).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestDatabaseIsMigratedAndOwn(t *testing.T) {
	t.Parallel()
	a, b := testenv.Database(t), testenv.Database(t)
	if countSchema(t, a) != 1 || countSchema(t, b) != 1 {
		t.Fatal("the schema commitbox is missing")
	}
	if _, err := a.Pool.Exec(t.Context(), `DROP SCHEMA commitbox CASCADE`); err != nil {
		t.Fatal(err)
	}
	if countSchema(t, b) != 1 {
		t.Error("two tests share a database")
	}
}

func TestEmptyDatabase(t *testing.T) {
	t.Parallel()
	if countSchema(t, testenv.EmptyDatabase(t)) != 0 {
		t.Error("an empty database has the schema commitbox")
	}
}
