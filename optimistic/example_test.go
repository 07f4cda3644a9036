package optimistic_test

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/optimistic"
)

// A row that was shown to a person at a version is changed only if it is still at that version.
func ExampleExec() {
	rename := func(ctx context.Context, pool *pgxpool.Pool, id string, seen int64, owner string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			row := optimistic.Row{Look: `select version from account where id = $1`, Key: []any{id}}
			version, err := optimistic.Exec(ctx, tx, row, seen,
				`update account set owner = $3, version = version + 1 where id = $1 and version = $2 returning version`, owner)
			var found *optimistic.Error
			switch {
			case errors.Is(err, optimistic.ErrNotFound):
				fmt.Println("404: it is not there any more")
			case errors.As(err, &found):
				fmt.Println("409: somebody was faster, look at version", found.Actual)
			case err == nil:
				fmt.Println("200: it is at version", version)
			}
			return err
		})
	}
	_ = rename
}

// The version stands for something that has no version column, here all lines of an order.
func ExampleAdvance() {
	addLine := func(ctx context.Context, tx pgx.Tx, orderID string, seen int64, sku string) error {
		if _, err := optimistic.Advance(ctx, tx, "order", orderID, seen); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `insert into order_line (order_id, sku) values ($1, $2)`, orderID, sku)
		return err
	}
	_ = addLine
}

// A change that depends on what is there is read and applied again until nobody was faster.
func ExampleRetry() {
	interest := func(ctx context.Context, pool *pgxpool.Pool, id string) error {
		row := optimistic.Row{Look: `select version from account where id = $1`, Key: []any{id}}
		_, err := optimistic.Retry(ctx, pool, optimistic.RetryConfig{}, func(ctx context.Context, tx pgx.Tx) (int64, error) {
			var balance, version int64
			err := tx.QueryRow(ctx, `select balance, version from account where id = $1`, id).Scan(&balance, &version)
			if err != nil {
				return 0, err
			}
			return optimistic.Exec(ctx, tx, row, version,
				`update account set balance = $3, version = version + 1 where id = $1 and version = $2 returning version`, balance+balance/50)
		})
		return err
	}
	_ = interest
}

// command is what a client sends, and sends again when it does not hear the answer.
type command struct {
	ID      string // the same on every copy
	Account string
	Version int64 // what the client has seen
	Owner   string
}

// execute answers with the account's new version. The command is claimed first, so a copy gets the answer of the first
// run. A conflict rolls back the claim too: a stale command stays stale, and its copies hear the same without a record.
func execute(ctx context.Context, pool *pgxpool.Pool, c command) (res inbox.Result[int64], err error) {
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		id := inbox.ID{Consumer: "accounts.rename", Message: c.ID}
		res, err = inbox.Handle(ctx, tx, id, func(ctx context.Context) (int64, error) {
			row := optimistic.Row{Look: `select version from account where id = $1`, Key: []any{c.Account}}
			return optimistic.Exec(ctx, tx, row, c.Version,
				`update account set owner = $3, version = version + 1 where id = $1 and version = $2 returning version`, c.Owner)
		})
		return err
	})
	return res, err
}

// With the inbox, a repeated command gets its old answer and a stale one a conflict.
func Example_inbox() {
	serve := func(ctx context.Context, pool *pgxpool.Pool, c command) {
		res, err := execute(ctx, pool, c)
		switch {
		case errors.Is(err, optimistic.ErrConflict):
			fmt.Println("409: read it again")
		case err == nil:
			fmt.Println("200: it is at version", res.Value, "replayed", res.Replayed)
		}
	}
	_ = serve
}
