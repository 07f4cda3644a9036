package main

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/optimistic"
)

// reserve is one way of taking goods, in the transaction that also marks the message as handled.
type reserve func(ctx context.Context, tx pgx.Tx, o order) (answer, error)

// service handles one delivery of an order. The answer is the same for every copy.
type service func(ctx context.Context, msg inbox.Message, o order) (inbox.Result[answer], error)

const consumer = "inventory.reserve"

// locking is the service with row locks: Process opens the transaction, claims the message, runs the handler and commits.
func locking(box *inbox.Box, take reserve) service {
	return func(ctx context.Context, msg inbox.Message, o order) (inbox.Result[answer], error) {
		return inbox.Process(ctx, box, msg, func(ctx context.Context, tx pgx.Tx) (answer, error) {
			return take(ctx, tx, o)
		})
	}
}

// versioned is the service with versions: Retry opens the transaction and runs all of it again after a conflict, with the
// claim of the message, which has been rolled back like everything else.
func versioned(pool *pgxpool.Pool, box *inbox.Box, take reserve) service {
	cfg := optimistic.RetryConfig{MaxAttempts: 20, BackoffBase: 5 * time.Millisecond, BackoffMax: 200 * time.Millisecond}
	return func(ctx context.Context, msg inbox.Message, o order) (inbox.Result[answer], error) {
		return optimistic.Retry(ctx, pool, cfg, func(ctx context.Context, tx pgx.Tx) (inbox.Result[answer], error) {
			return inbox.Handle(ctx, tx, msg.ID, func(ctx context.Context) (answer, error) {
				return take(ctx, tx, o)
			}, inbox.Using(box))
		})
	}
}
