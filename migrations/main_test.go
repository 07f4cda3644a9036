package migrations_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func exec(t *testing.T, db *testenv.DB, sql string, args ...any) {
	t.Helper()
	if _, err := db.Pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// one returns the only value that a statement answers with.
func one[T any](t *testing.T, db *testenv.DB, sql string, args ...any) T {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), sql, args...)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}
