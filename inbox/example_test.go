package inbox_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
)

// A consumer hands every delivery to Process and settles it as Disposition says.
func ExampleProcess() {
	consume := func(ctx context.Context, box *inbox.Box, orderID string, payload []byte) inbox.Action {
		msg := inbox.Message{ID: inbox.ID{Consumer: "payments.charge", Message: orderID}, Payload: payload}
		res, err := inbox.Process(ctx, box, msg, func(ctx context.Context, tx pgx.Tx) (int, error) {
			var number int
			err := tx.QueryRow(ctx, `insert into receipt (order_id) values ($1) returning number`, orderID).Scan(&number)
			return number, err
		})
		if err == nil {
			fmt.Println("receipt", res.Value, "replayed", res.Replayed)
		}
		return inbox.Disposition(err)
	}
	_ = consume
}

// Where the transaction is the caller's, Handle claims the message in it.
func ExampleHandle() {
	pay := func(ctx context.Context, pool *pgxpool.Pool, eventID string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			id := inbox.ID{Consumer: "payments.charge", Message: eventID}
			_, err := inbox.Handle(ctx, tx, id, func(ctx context.Context) (inbox.Void, error) {
				_, err := tx.Exec(ctx, `update account set balance = balance - 10 where id = 1`)
				return inbox.Void{}, err
			})
			return err
		})
	}
	_ = pay
}

func ExampleDisposition() {
	for _, err := range []error{
		nil,
		&inbox.Error{Outcome: inbox.InProgress},
		&inbox.Error{Outcome: inbox.Dead},
		&inbox.Error{Outcome: inbox.Dead, PayloadKept: true},
	} {
		action := inbox.Disposition(err)
		fmt.Println(action.Verdict, action.After)
	}
	// Output:
	// ack 0s
	// retry 1s
	// dead_letter 0s
	// ack 0s
}
