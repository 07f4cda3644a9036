package sqltx_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
	"github.com/commitbox/commitbox/sqltx"
)

// Prepared statements stay on a connection that the next transaction may not get, so these stacks work without them.
var behindAPooler = []stack{
	{"database/sql on pgx, exec mode", on(overPGX(pgx.QueryExecModeExec), plain)},
	{"database/sql on pgx, simple protocol", on(overPGX(pgx.QueryExecModeSimpleProtocol), plain)},
	{"database/sql on lib/pq", on(overPQ(""), plain)},
	{"database/sql on lib/pq, binary parameters", on(overPQ("&binary_parameters=yes"), plain)},
	{"sqlx on lib/pq", on(overPQ(""), withSQLX)},
	{"GORM, exec mode", on(overPGX(pgx.QueryExecModeExec), withGORM(false))},
	{"bun, exec mode", on(overPGX(pgx.QueryExecModeExec), withBun)},
	{"ent on lib/pq", on(overPQ(""), withEnt)},
}

// Through PgBouncer in transaction mode, with fewer connections than transactions: copies at the same time have one effect,
// and a failure goes back to its savepoint.
func TestB60_EveryStackBehindATransactionPooler(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), `create table effects (id bigint generated always as identity primary key, note text not null)`); err != nil {
		t.Fatal(err)
	}
	for _, s := range behindAPooler {
		t.Run(s.name, func(t *testing.T) {
			w := &world{T: t, DB: db, stack: s, open: s.connect(t, db.Bouncer(t)), id: inbox.ID{Consumer: "orders", Message: s.name}}
			handle := func(end error) error {
				tx, add, err := w.open(context.Background(), nil)
				if err != nil {
					return err
				}
				defer func() { _ = tx.Rollback() }()
				view := sqltx.From(tx)
				_, err = inbox.Handle(t.Context(), view, w.id, func(ctx context.Context) (receipt, error) {
					_, err := outbox.Enqueue(ctx, view, messages(s.name)...)
					return receipt{Number: 1}, errors.Join(err, add(ctx, s.name), end)
				})
				if err != nil && !errors.Is(err, errMine) {
					return err
				}
				return tx.Commit()
			}
			if err := handle(errMine); err != nil {
				t.Fatal(err)
			}
			w.want(0, "failed 1", 0)
			if _, err := db.Pool.Exec(t.Context(), `update commitbox.inbox set next_attempt_at = now() where message_id = $1`, s.name); err != nil {
				t.Fatal(err)
			}
			var group sync.WaitGroup
			for range 8 {
				group.Go(func() {
					err := handle(nil)
					for errors.Is(err, inbox.ErrInProgress) {
						err = handle(nil)
					}
					if err != nil {
						t.Error(err)
					}
				})
			}
			group.Wait()
			w.want(1, "completed 2", 4)
		})
	}
}
