package optimistic_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/optimistic"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// world is a database with a table that has a version column.
type world struct {
	*testenv.DB
	t *testing.T
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	w := &world{testenv.Database(t), t}
	w.exec(`create table account (id text primary key, owner text, balance bigint not null default 0, version bigint not null default 0)`)
	w.exec(`insert into account (id, owner, version) values ('a', 'Ada', 7), ('b', 'Bob', 7)`)
	return w
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.Pool.Exec(context.Background(), sql, args...); err != nil {
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

// wantUsable asserts that a transaction can go on, and commits it.
func (w *world) wantUsable(tx pgx.Tx) {
	w.t.Helper()
	if _, err := tx.Exec(context.Background(), `insert into account (id) values ('later')`); err != nil {
		w.t.Errorf("the transaction is not usable: %v", err)
	}
	w.commit(tx)
	if n := one[int](w, `select count(*)::int from account where id = 'later'`); n != 1 {
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

// view is a transaction as package sqltx shows one of database/sql: no connection, no COPY, no prepared statements.
type view struct{ tx pgx.Tx }

func (v view) Begin(context.Context) (pgx.Tx, error) { panic("not called") }
func (v view) Commit(ctx context.Context) error      { return v.tx.Commit(ctx) }
func (v view) Rollback(ctx context.Context) error    { return v.tx.Rollback(ctx) }
func (v view) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	panic("not called")
}

func (v view) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return v.tx.SendBatch(ctx, b)
}
func (v view) LargeObjects() pgx.LargeObjects { panic("not called") }
func (v view) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	panic("not called")
}

func (v view) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return v.tx.Exec(ctx, sql, args...)
}

func (v view) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return v.tx.Query(ctx, sql, args...)
}

func (v view) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return v.tx.QueryRow(ctx, sql, args...)
}
func (v view) Conn() *pgx.Conn { return nil }
