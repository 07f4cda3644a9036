package sqltx_test

import (
	"context"
	"database/sql"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
	"github.com/commitbox/commitbox/sqltx"
)

// One transaction of database/sql with the business change, the message that tells of it, and the mark of the message that
// asked for it.
func ExampleFrom() {
	pay := func(ctx context.Context, db *sql.DB, id inbox.ID, order string) error {
		tx, err := db.BeginTx(context.WithoutCancel(ctx), nil) // a cancelled ctx would take the record of a failure with it
		if err != nil {
			return err
		}
		defer tx.Rollback()
		view := sqltx.From(tx)
		_, failed := inbox.Handle(ctx, view, id, func(ctx context.Context) (inbox.Void, error) {
			if _, err := tx.ExecContext(ctx, `update orders set paid = true where id = $1`, order); err != nil {
				return inbox.Void{}, err
			}
			_, err := outbox.Enqueue(ctx, view, outbox.Message{Topic: "orders.paid", Key: order})
			return inbox.Void{}, err
		})
		if err := tx.Commit(); err != nil { // also after a failure: its record is in the transaction
			return err
		}
		return failed
	}
	_ = pay
}
