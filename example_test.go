package commitbox_test

import (
	"context"
	"errors"
	"log"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// placeOrder commits an order and its message together, or neither.
func placeOrder(ctx context.Context, pool *pgxpool.Pool, id string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `insert into orders (id) values ($1)`, id); err != nil {
			return err
		}
		_, err := outbox.Enqueue(ctx, tx, outbox.Message{Topic: "orders.placed", Key: id, Payload: []byte(id)})
		return err
	})
}

// relay publishes what was committed, until ctx ends.
func relay(ctx context.Context, pool *pgxpool.Pool, p outbox.Publisher) error {
	r, err := outbox.NewRelay(pool, p, outbox.RelayConfig{})
	if err != nil {
		return err
	}
	return r.Run(ctx)
}

// pay takes the money once, however often the message is delivered.
func pay(ctx context.Context, box *inbox.Box, msg inbox.Message) error {
	_, err := inbox.Process(ctx, box, msg, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		_, err := tx.Exec(ctx, `insert into payments (order_id) values ($1)`, string(msg.Payload))
		return inbox.Void{}, err
	})
	return err // inbox.Disposition(err) says what to tell the broker: ack, retry after a while, dead letter
}

func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	box, err := inbox.New(pool, inbox.Config{})
	if err != nil {
		log.Fatal(err)
	}

	// In place of a broker that delivers twice.
	broker := outbox.PublishFunc(func(ctx context.Context, r outbox.Record) error {
		defer stop()
		msg := inbox.Message{ID: inbox.ID{Consumer: "payments", Message: r.ID.String()}, Payload: r.Payload}
		return errors.Join(pay(ctx, box, msg), pay(ctx, box, msg))
	})

	if err := placeOrder(ctx, pool, "A-1"); err != nil {
		log.Fatal(err)
	}
	if err := relay(ctx, pool, broker); err != nil {
		log.Fatal(err)
	}
}
