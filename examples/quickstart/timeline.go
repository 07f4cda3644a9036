package main

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

// addToTimeline is the read model: one row per event of an order.
func addToTimeline(ctx context.Context, tx pgx.Tx, msg inbox.Message) error {
	e, err := decodeEvent(msg.Payload)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `insert into timeline (order_id, event) values ($1, $2)`, e.OrderID, e.Type)
	return err
}
