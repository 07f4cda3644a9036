package sqltx_test

import (
	"context"
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/sqltx"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// open returns a database of the library, seen through database/sql.
func open(t *testing.T) *sql.DB {
	t.Helper()
	t.Parallel()
	config, err := pgx.ParseConfig(testenv.Database(t).URL)
	if err != nil {
		t.Fatal(err)
	}
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// begin returns a transaction and its view.
func begin(t *testing.T, db *sql.DB) (*sql.Tx, pgx.Tx) {
	t.Helper()
	tx, err := db.BeginTx(context.Background(), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback() })
	return tx, sqltx.From(tx)
}

func exec(t *testing.T, tx pgx.Tx, statement string, args ...any) {
	t.Helper()
	if _, err := tx.Exec(t.Context(), statement, args...); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
}

func one[T any](t *testing.T, tx pgx.Tx, statement string, args ...any) (value T) {
	t.Helper()
	if err := tx.QueryRow(t.Context(), statement, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", statement, err)
	}
	return value
}
