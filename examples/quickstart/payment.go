package main

import (
	"context"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// pay is the payment service: it takes the money, takes the goods out of stock and says so in a message, all in the
// transaction that also marks the incoming message as handled.
func pay(ctx context.Context, tx pgx.Tx, msg inbox.Message) error {
	order, err := decodeEvent(msg.Payload)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `insert into payments (order_id, amount) values ($1, $2)`, order.OrderID, order.Amount)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, `update stock set available = available - $2 where sku = $1`, order.SKU, order.Quantity)
	if err != nil {
		return err
	}
	order.Type = ordersPaid
	payload, err := order.encode()
	if err != nil {
		return err
	}
	_, err = outbox.Enqueue(ctx, tx, outbox.Message{
		Topic: ordersPaid, Key: order.OrderID, ContentType: "application/json", Payload: payload,
	})
	return err
}
