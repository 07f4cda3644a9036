package sqltx_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
	"github.com/commitbox/commitbox/sqltx"
)

// bun.Tx has the methods that sqltx.Tx asks for, but it formats queries itself and loses the arguments of those of others.
// It is refused before anything is sent, and goes on.
func TestBunsOwnTransactionIsRefused(t *testing.T) {
	t.Parallel()
	db := overPGX(pgx.QueryExecModeCacheStatement)(t, testenv.Database(t).URL)
	t.Cleanup(func() { _ = db.Close() })
	tx, err := bun.NewDB(db, pgdialect.New()).BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback() }()
	for name, view := range map[string]pgx.Tx{"bun.Tx": sqltx.From(tx), "*bun.Tx": sqltx.From(&tx)} {
		_, enqueueErr := outbox.Enqueue(t.Context(), view, outbox.Message{Topic: "t"})
		_, handleErr := inbox.Handle(t.Context(), view, inbox.ID{Consumer: "c", Message: "m"}, func(context.Context) (int, error) {
			t.Error("the handler ran")
			return 0, nil
		})
		_, execErr := view.Exec(t.Context(), `select 1`)
		for call, err := range map[string]error{"enqueue": enqueueErr, "handle": handleErr, "exec": execErr, "commit": view.Commit(t.Context())} {
			if input := (*commitbox.InputError)(nil); !errors.As(err, &input) || input.Field != "tx" {
				t.Errorf("%s, %s: %v", name, call, err)
			}
		}
	}
	if _, err := outbox.Enqueue(t.Context(), sqltx.From(tx.Tx), outbox.Message{Topic: "t"}); err != nil {
		t.Errorf("its field Tx: %v", err)
	}
	if _, err := tx.ExecContext(t.Context(), `select $1::text`, "x"); err == nil {
		t.Error("bun passes arguments on now: it need not be refused any more")
	}
}
