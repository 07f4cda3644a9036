package sqltx_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
	"github.com/commitbox/commitbox/sqltx"
)

func TestP14_NoTransactionIsRefused(t *testing.T) {
	t.Parallel()
	for name, tx := range map[string]sqltx.Tx{"nil": nil, "a nil *sql.Tx": (*sql.Tx)(nil)} {
		_, err := outbox.Enqueue(t.Context(), sqltx.From(tx), outbox.Message{Topic: "t"})
		if input := (*commitbox.InputError)(nil); !errors.As(err, &input) || input.Field != "tx" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// However a transaction was ended, everything says so, and nothing is sent.
func TestAnEndedTransactionAnswersClosed(t *testing.T) {
	db := open(t)
	for name, end := range map[string]func(*sql.Tx, pgx.Tx) error{
		"commit of the view":          func(_ *sql.Tx, view pgx.Tx) error { return view.Commit(t.Context()) },
		"rollback of the view":        func(_ *sql.Tx, view pgx.Tx) error { return view.Rollback(t.Context()) },
		"commit of the transaction":   func(tx *sql.Tx, _ pgx.Tx) error { return tx.Commit() },
		"rollback of the transaction": func(tx *sql.Tx, _ pgx.Tx) error { return tx.Rollback() },
	} {
		tx, view := begin(t, db)
		inner, err := view.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if err := end(tx, view); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, v := range []pgx.Tx{view, inner, sqltx.From(tx)} {
			wantClosed(t, name, v)
		}
		if _, err := outbox.Enqueue(t.Context(), view, outbox.Message{Topic: "t"}); !errors.Is(err, pgx.ErrTxClosed) || !errors.As(err, new(*commitbox.InputError)) {
			t.Errorf("%s: enqueue: %v", name, err)
		}
	}
}

func wantClosed(t *testing.T, name string, v pgx.Tx) {
	t.Helper()
	ctx := t.Context()
	_, beginErr := v.Begin(ctx)
	_, execErr := v.Exec(ctx, `select 1`)
	_, queryErr := v.Query(ctx, `select 1`)
	queued := new(pgx.Batch)
	queued.Queue(`select 1`)
	objects := v.LargeObjects()
	_, objectErr := objects.Create(ctx, 0)
	for method, err := range map[string]error{
		"Begin": beginErr, "Exec": execErr, "Query": queryErr, "QueryRow": v.QueryRow(ctx, `select 1`).Scan(new(int)),
		"SendBatch": v.SendBatch(ctx, queued).Close(), "an empty batch": v.SendBatch(ctx, new(pgx.Batch)).Close(),
		"Commit": v.Commit(ctx), "Rollback": v.Rollback(ctx), "LargeObjects": objectErr,
	} {
		if !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("%s: %s: %v", name, method, err)
		}
	}
}

// The question whether a transaction has ended sends nothing: on a connection of which the server has gone it is answered
// all the same.
func TestAskingForTheEndSendsNothing(t *testing.T) {
	db := open(t)
	tx, view := begin(t, db)
	pid := one[int](t, view, `select pg_backend_pid()`)
	if _, err := db.ExecContext(t.Context(), `select pg_terminate_backend($1, 5000)`, pid); err != nil {
		t.Fatal(err)
	}
	for kind, v := range map[string]pgx.Tx{"a *sql.Tx": view, "a wrapper": sqltx.From(wrapper{tx})} {
		if err := v.SendBatch(t.Context(), new(pgx.Batch)).Close(); err != nil {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if err := view.QueryRow(t.Context(), `select 1`).Scan(new(int)); err == nil {
		t.Error("the server was not gone")
	}
	_ = tx.Rollback()
	for kind, v := range map[string]pgx.Tx{"a *sql.Tx": view, "a wrapper": sqltx.From(wrapper{tx})} {
		if err := v.SendBatch(t.Context(), new(pgx.Batch)).Close(); !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("%s after the end: %v", kind, err)
		}
	}
}

// wrapper has only what sqltx.Tx asks for, as an ent.Tx.
type wrapper struct{ tx *sql.Tx }

func (w wrapper) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	return w.tx.ExecContext(ctx, query, args...)
}

func (w wrapper) QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error) {
	return w.tx.QueryContext(ctx, query, args...)
}
func (w wrapper) Commit() error   { return w.tx.Commit() }
func (w wrapper) Rollback() error { return w.tx.Rollback() }

func TestSavepoints(t *testing.T) {
	_, view := begin(t, open(t))
	ctx := t.Context()
	exec(t, view, `create temp table n (v int)`)
	add := func(tx pgx.Tx, v int) { exec(t, tx, `insert into n values ($1)`, v) }
	begin := func(tx pgx.Tx) pgx.Tx {
		inner, err := tx.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		return inner
	}
	add(view, 1)
	first := begin(view)
	add(first, 2)
	second := begin(first)
	add(second, 3)
	if err := second.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	add(first, 4)
	if err := first.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	third := begin(view)
	if _, err := third.Exec(ctx, `select 1/0`); err == nil {
		t.Fatal("no error")
	}
	if err := third.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	for _, ended := range []pgx.Tx{first, second, third} {
		wantClosed(t, "savepoint", ended)
	}
	if got := one[[]int32](t, view, `select array_agg(v order by v) from n`); !slices.Equal(got, []int32{1, 2, 4}) {
		t.Errorf("%v", got)
	}
}

func TestCommitOfAnEndedContextRollsBack(t *testing.T) {
	db := open(t)
	_, view := begin(t, db)
	exec(t, view, `create table n (v int)`)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := view.Commit(ctx); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	wantClosed(t, "afterwards", view)
	_, again := begin(t, db)
	if one[bool](t, again, `select to_regclass('n') is not null`) {
		t.Error("it was committed")
	}
}

// A savepoint that cannot be rolled back to, because the handler has left rows open, takes the transaction with it.
func TestASavepointThatIsStuckEndsTheTransaction(t *testing.T) {
	db := open(t)
	tx, view := begin(t, db)
	savepoint, err := view.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, err = inbox.Handle(t.Context(), savepoint, inbox.ID{Consumer: "c", Message: "m"}, func(ctx context.Context) (int, error) {
		rows, err := tx.QueryContext(ctx, `select repeat('x', 1000) from generate_series(1, 10000)`)
		if err != nil {
			return 0, err
		}
		t.Cleanup(func() { _ = rows.Close() })
		return 1, rows.Err()
	})
	if err == nil {
		t.Error("no error")
	}
	_ = tx.Commit()
	_, again := begin(t, db)
	if one[int](t, again, `select count(*) from commitbox.inbox`) != 0 {
		t.Error("the row is committed as completed")
	}
}

func TestBatch(t *testing.T) {
	_, view := begin(t, open(t))
	exec(t, view, `create temp table n (v int)`)
	var calls []string
	var tag pgconn.CommandTag
	batch := new(pgx.Batch)
	batch.Queue(`insert into n values (@a), (@b)`, pgx.NamedArgs{"a": 1, "b": 2}).Exec(func(got pgconn.CommandTag) error {
		tag = got
		calls = append(calls, "exec")
		return nil
	})
	batch.Queue(`insert into n values (3)`) // without a function it runs too
	batch.Queue(`select count(*) from n`).QueryRow(func(row pgx.Row) error {
		var n int
		err := row.Scan(&n)
		if n != 3 {
			t.Errorf("%d rows", n)
		}
		calls = append(calls, "row")
		return err
	})
	batch.Queue(`select v from n order by v`).Query(func(rows pgx.Rows) error {
		got, err := pgx.CollectRows(rows, pgx.RowTo[int])
		if !slices.Equal(got, []int{1, 2, 3}) {
			t.Errorf("%v", got)
		}
		calls = append(calls, "rows")
		return err
	})
	results := view.SendBatch(t.Context(), batch)
	for range 2 { // Close is safe to be called twice, and the functions run once
		if err := results.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(calls, []string{"exec", "row", "rows"}) || tag.RowsAffected() != 2 {
		t.Errorf("%v, %d", calls, tag.RowsAffected())
	}
	if _, err := results.Exec(); err == nil {
		t.Error("a closed batch answered")
	}
}

func TestBatchEndsWithItsFirstError(t *testing.T) {
	_, view := begin(t, open(t))
	inner, err := view.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	batch := new(pgx.Batch)
	batch.Queue(`select 1/0`)
	batch.Queue(`select 1`).QueryRow(func(pgx.Row) error {
		t.Error("what comes after an error was run")
		return nil
	})
	results := inner.SendBatch(t.Context(), batch)
	for range 2 {
		if pg := (*pgconn.PgError)(nil); !errors.As(results.Close(), &pg) || pg.Code != "22012" {
			t.Errorf("%v", results.Close())
		}
	}
	if err := inner.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	batch = new(pgx.Batch)
	batch.Queue(`select 1`).QueryRow(func(pgx.Row) error { return io.EOF })
	if err := view.SendBatch(t.Context(), batch).Close(); !errors.Is(err, io.EOF) {
		t.Errorf("the function's error: %v", err)
	}
}

func TestWhatIsNotSupportedSaysSo(t *testing.T) {
	_, view := begin(t, open(t))
	_, copyErr := view.CopyFrom(t.Context(), pgx.Identifier{"t"}, []string{"a"}, pgx.CopyFromRows(nil))
	_, prepareErr := view.Prepare(t.Context(), "p", `select 1`)
	batch := new(pgx.Batch)
	batch.BeginTx(pgx.TxOptions{})
	for method, err := range map[string]error{"copy": copyErr, "prepare": prepareErr, "begin in a batch": view.SendBatch(t.Context(), batch).Close()} {
		if !errors.Is(err, errors.ErrUnsupported) {
			t.Errorf("%s: %v", method, err)
		}
	}
	if view.Conn() != nil {
		t.Error("a connection")
	}
	if got := one[int](t, view, `select 1`); got != 1 {
		t.Error("the transaction does not go on")
	}
}

// A message that is being handled is known by its transaction, whichever view of it is asked.
func TestNestedHandleIsRefusedThroughAnyView(t *testing.T) {
	tx, view := begin(t, open(t))
	id := inbox.ID{Consumer: "c", Message: "m"}
	_, err := inbox.Handle(t.Context(), view, id, func(ctx context.Context) (int, error) {
		savepoint, err := view.Begin(ctx)
		if err != nil {
			return 0, err
		}
		for name, other := range map[string]pgx.Tx{"the view": view, "another view": sqltx.From(tx), "a savepoint": savepoint} {
			_, err := inbox.Handle(ctx, other, id, func(context.Context) (int, error) { return 2, nil })
			if !errors.Is(err, inbox.ErrNested) {
				t.Errorf("%s: %v", name, err)
			}
		}
		return 1, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// tagged is a transaction of a type that cannot be compared.
type tagged struct {
	*sql.Tx
	tags []string
}

func TestATransactionOfAnyTypeServes(t *testing.T) {
	tx, _ := begin(t, open(t))
	for range 2 {
		view := sqltx.From(tagged{tx, nil})
		_, err := inbox.Handle(t.Context(), view, inbox.ID{Consumer: "c", Message: "m"}, func(context.Context) (int, error) { return 1, nil })
		if err != nil {
			t.Fatal(err)
		}
	}
}

// uncounted is a driver that does not tell how many rows a statement has written.
type uncounted struct{ *sql.Tx }

func (u uncounted) ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error) {
	_, err := u.Tx.ExecContext(ctx, query, args...)
	return driver.ResultNoRows, err
}

// A first delivery whose claim is not counted must not look like a duplicate: its handler would never run.
func TestADriverThatDoesNotCountIsRefused(t *testing.T) {
	db := open(t)
	tx, _ := begin(t, db)
	result, err := inbox.Handle(t.Context(), sqltx.From(uncounted{tx}), inbox.ID{Consumer: "c", Message: "m"}, func(context.Context) (inbox.Void, error) {
		return inbox.Void{}, nil
	})
	if err == nil || result.Replayed {
		t.Errorf("answered %v: %v", result.Outcome, err)
	}
}
