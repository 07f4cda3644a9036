package optimistic_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/optimistic"
	"github.com/commitbox/commitbox/sqltx"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// world is a database with a table that has a version column.
type world struct {
	*testenv.DB
	t   *testing.T
	sql *sql.DB
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	db := testenv.Database(t)
	w := &world{db, t, stdlib.OpenDBFromPool(db.Pool)}
	t.Cleanup(func() { _ = w.sql.Close() })
	w.exec(`create table account (id text primary key, owner text, balance bigint not null default 0, version bigint not null default 0)`)
	return w.reset(t)
}

// reset makes the rows what they were, and returns the world for a test whose transactions end with it.
func (w *world) reset(t *testing.T) *world {
	t.Helper()
	w = &world{w.DB, t, w.sql}
	w.exec(`delete from account`)
	w.exec(`delete from commitbox.resource_version`)
	w.exec(`insert into account (id, owner, version) values ('a', 'Ada', 7), ('b', 'Bob', 7)`)
	return w
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if _, err := w.Pool.Exec(ctx, sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) begin(levels ...pgx.TxIsoLevel) pgx.Tx {
	w.t.Helper()
	tx, err := w.Pool.BeginTx(context.Background(), pgx.TxOptions{IsoLevel: append(levels, pgx.ReadCommitted)[0]})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

// beginSQL begins a transaction of database/sql.
func (w *world) beginSQL() pgx.Tx {
	w.t.Helper()
	tx, err := w.sql.BeginTx(context.Background(), nil)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = tx.Rollback() })
	return sqltx.From(tx)
}

func (w *world) commit(tx pgx.Tx) {
	w.t.Helper()
	if err := tx.Commit(context.Background()); err != nil {
		w.t.Errorf("commit: %v", err)
	}
}

func one[T any](w *world, sql string, args ...any) T {
	w.t.Helper()
	rows, err := w.Pool.Query(context.Background(), sql, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
	return value
}

// wantAccount asserts what is committed of an account.
func (w *world) wantAccount(id, owner string, version int64) {
	w.t.Helper()
	if got := one[string](w, `select owner from account where id = $1`, id); got != owner {
		w.t.Errorf("account %s belongs to %s, want %s", id, got, owner)
	}
	if got := one[int64](w, `select version from account where id = $1`, id); got != version {
		w.t.Errorf("account %s is at version %d, want %d", id, got, version)
	}
}

// wantUsable asserts that a transaction can go on: it writes, commits, and takes away what it has written.
func (w *world) wantUsable(tx pgx.Tx) {
	w.t.Helper()
	if _, err := tx.Exec(context.Background(), `insert into account (id) values ('later')`); err != nil {
		w.t.Errorf("the transaction is not usable: %v", err)
	}
	w.commit(tx)
	if n := one[int](w, `with gone as (delete from account where id = 'later' returning id) select count(*)::int from gone`); n != 1 {
		w.t.Errorf("%d rows were written after the answer, want 1", n)
	}
}

// wantSpoilt asserts that a transaction can only be rolled back.
func (w *world) wantSpoilt(tx pgx.Tx) {
	w.t.Helper()
	if err := tx.Commit(context.Background()); !errors.Is(err, pgx.ErrTxCommitRollback) {
		w.t.Errorf("commit answers %v, want that it was rolled back", err)
	}
}

// wantError asserts what an answer is and what it carries.
func wantError(t *testing.T, err, reason error, expected, actual int64, pending bool) {
	t.Helper()
	var e *optimistic.Error
	if !errors.Is(err, reason) || !errors.As(err, &e) || e.Expected != expected || e.Actual != actual || e.Pending != pending {
		t.Errorf("got %v (%+v), want %v, expected %d, actual %d, pending %v", err, e, reason, expected, actual, pending)
	}
	if got, want := optimistic.Retryable(err), errors.Is(reason, optimistic.ErrConflict); got != want {
		t.Errorf("%v: retryable is %v", err, got)
	}
}

func sqlState(err error) string {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		return pg.Code
	}
	return ""
}

// account and rename are what a program writes for its table.
func account(id string) optimistic.Row {
	return optimistic.Row{Look: `select version from account where id = $1`, Key: []any{id}}
}

const rename = `update account set owner = $3, version = version + 1 where id = $1 and version = $2 returning version`
