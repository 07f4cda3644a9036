package inbox_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

func TestSavepointsEndWithTheHandler(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for name, result := range map[string]error{"committed": nil, "rolled back": errors.New("boom")} {
		id := inbox.ID{Consumer: "c", Message: name}
		var kept []pgx.Tx
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (v inbox.Void, err error) {
			for range 2 {
				if tx, err = tx.Begin(ctx); err != nil {
					return v, err
				}
				kept = append(kept, tx)
			}
			return v, result
		})
		if (err == nil) != (result == nil) {
			t.Fatalf("%s: %v", name, err)
		}
		for depth, tx := range kept {
			if err := write(t.Context(), tx, id, "late"); !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("%s: a write in savepoint %d after the end: %v", name, depth, err)
			}
			for what, end := range map[string]func(context.Context) error{"commit": tx.Commit, "rollback": tx.Rollback} {
				if err := end(t.Context()); !errors.Is(err, pgx.ErrTxClosed) {
					t.Errorf("%s: %s of savepoint %d after the end: %v", name, what, depth, err)
				}
			}
		}
		w.wantEffects(id, 0)
	}
}

func TestSavepointsWorkInAHandler(t *testing.T) {
	w := newWorld(t)
	_, err := inbox.Process(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (v inbox.Void, err error) {
		for _, end := range []func(pgx.Tx) error{
			func(tx pgx.Tx) error { return tx.Rollback(ctx) },
			func(tx pgx.Tx) error { return tx.Commit(ctx) },
		} {
			savepoint, err := tx.Begin(ctx)
			if err != nil {
				return v, err
			}
			if err := errors.Join(write(ctx, savepoint, anID, "part"), end(savepoint)); err != nil {
				return v, err
			}
			if err := savepoint.Commit(ctx); !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("a savepoint that has ended: %v", err)
			}
		}
		return v, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
}
