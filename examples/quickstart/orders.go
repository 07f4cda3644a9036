package main

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// placeOrder writes an order and its message. Either both exist afterwards or neither.
func placeOrder(ctx context.Context, pool *pgxpool.Pool, order event) error {
	payload, err := order.encode()
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, `insert into orders (id, sku, quantity, amount) values ($1, $2, $3, $4)`,
			order.OrderID, order.SKU, order.Quantity, order.Amount)
		if err != nil {
			return err
		}
		_, err = outbox.Enqueue(ctx, tx, outbox.Message{
			Topic: ordersPlaced, Key: order.OrderID, ContentType: "application/json", Payload: payload,
		})
		return err
	})
}

// sellers is how many orders are placed at the same time.
const sellers = 4

// placeOrders is the order service: it places n orders.
func placeOrders(ctx context.Context, pool *pgxpool.Pool, n int) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	results := make(chan error, sellers)
	for seller := range sellers {
		go func() {
			var err error
			for i := seller; i < n && err == nil; i += sellers {
				err = placeOrder(ctx, pool, newOrder(i))
			}
			if err != nil {
				cancel()
			}
			results <- err
		}()
	}
	var errs []error
	for range sellers {
		errs = append(errs, <-results)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("place orders: %w", err)
	}
	return nil
}

func newOrder(i int) event {
	return event{
		Type: ordersPlaced, OrderID: uuid.NewString(),
		SKU: fmt.Sprintf("sku-%d", i%10), Quantity: 1 + i%3, Amount: 500 * (1 + i%3),
	}
}
