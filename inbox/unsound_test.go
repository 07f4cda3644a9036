package inbox_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/schema"
)

// pointerError panics in Error if it is a nil pointer, as a typed nil returned by mistake does.
type pointerError struct{ text string }

func (e *pointerError) Error() string { return e.text }

// isError panics when it is compared.
type isError struct{}

func (isError) Error() string { return "cannot be compared" }
func (isError) Is(error) bool { panic("compared") }

var unsoundErrors = map[string]error{"typed nil": (*pointerError)(nil), "panics in Is": isError{}}

func panicking(error) bool { panic("IsPermanent") }

func TestF04_HandleWithAnErrorThatPanics(t *testing.T) {
	w := newWorld(t)
	fails := map[string]error{"IsPermanent panics": errors.New("boom")}
	for name, err := range unsoundErrors {
		fails[name] = err
	}
	box := w.box(inbox.Config{IsPermanent: panicking})
	for name, fail := range fails {
		id := inbox.ID{Consumer: "c", Message: name}
		tx := w.begin()
		_, err := inbox.Handle(t.Context(), tx, id, func(ctx context.Context) (inbox.Void, error) {
			if err := write(ctx, tx, id, "half"); err != nil {
				t.Error(err)
			}
			return inbox.Void{}, fail
		}, inbox.Using(box))
		if !errors.Is(err, inbox.ErrFailed) || err.Error() == "" {
			t.Errorf("%s: %v", name, err)
		}
		w.commit(tx)
		w.wantEffects(id, 0)
		w.wantRow(id, "failed", 1)
	}
}

func TestProcessWithAnErrorThatPanics(t *testing.T) {
	w := newWorld(t)
	for name, fail := range unsoundErrors {
		id := inbox.ID{Consumer: "c", Message: name}
		_, err := inbox.Process(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			return inbox.Void{}, errors.Join(write(ctx, tx, id, "half"), fail)
		})
		var panicked *inbox.PanicError
		if !errors.Is(err, inbox.ErrFailed) || !errors.As(err, &panicked) {
			t.Errorf("%s: %v", name, err)
		}
		w.wantEffects(id, 0)
		w.wantRow(id, "failed", 1)
	}
	_, err := inbox.Process(t.Context(), w.box(inbox.Config{IsPermanent: panicking}), inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, errors.New("boom")
	})
	if !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("IsPermanent panics: %v", err)
	}
	w.wantRow(anID, "failed", 1)
	if err := inbox.RecordFailure(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, (*pointerError)(nil)); !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("RecordFailure: %v", err)
	}
	w.wantRow(anID, "failed", 2)
}

// faultyTx is a transaction that meets one statement with a fault of the client's, so that PostgreSQL never sees it.
type faultyTx struct {
	pgx.Tx
	sql   string
	fault func() error
}

func (f *faultyTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if sql == f.sql {
		return pgconn.CommandTag{}, f.fault()
	}
	return f.Tx.Exec(ctx, sql, args...)
}

func TestF04_UnconfirmedEndSpoilsTheTransaction(t *testing.T) {
	w := newWorld(t)
	lost := func() error { return errors.New("not sent") }
	for _, c := range []struct {
		name, sql string
		fault     func() error
		fails     error
	}{
		{"undo is refused", schema.RollbackSavepoint, lost, errors.New("boom")},
		{"undo panics", schema.RollbackSavepoint, func() error { panic("tracer") }, errors.New("boom")},
		{"release panics", schema.ReleaseSavepoint, func() error { panic("tracer") }, nil},
		{"the store failed", "no statement", lost, &pgconn.PgError{Code: "53300"}},
	} {
		id := inbox.ID{Consumer: "c", Message: c.name}
		tx := w.begin()
		func() {
			defer func() { _ = recover() }()
			_, err := inbox.Handle(t.Context(), &faultyTx{tx, c.sql, c.fault}, id, func(ctx context.Context) (inbox.Void, error) {
				return inbox.Void{}, errors.Join(write(ctx, tx, id, "half"), c.fails)
			})
			if err == nil {
				t.Errorf("%s: no error", c.name)
			}
		}()
		if err := tx.Commit(t.Context()); err == nil {
			t.Errorf("%s: the transaction could be committed", c.name)
		}
		w.wantEffects(id, 0)
		w.wantRow(id, "", 0)
	}
}

func TestF04_RowsLeftOpenSpoilTheTransaction(t *testing.T) {
	w := newWorld(t)
	tx := w.begin()
	var rows pgx.Rows
	_, err := inbox.Handle(t.Context(), tx, anID, func(ctx context.Context) (_ inbox.Void, err error) {
		if err := write(ctx, tx, anID, "half"); err != nil {
			return inbox.Void{}, err
		}
		rows, err = tx.Query(ctx, `select generate_series(1, 3)`)
		return inbox.Void{}, errors.Join(err, errors.New("boom"))
	})
	if !errors.Is(err, inbox.ErrFailed) {
		t.Fatalf("got %v", err)
	}
	rows.Close()
	if err := tx.Commit(t.Context()); err == nil {
		t.Error("the transaction could be committed")
	}
	w.wantEffects(anID, 0)
	w.wantRow(anID, "", 0)
}
