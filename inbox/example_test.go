package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/cache"
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

// Work that leaves the database runs under a lease. Each step is stored, so that a crash after the charge goes on behind
// it; the message's id goes to the payment service, which recognises a repeat.
func ExampleProcessLeased() {
	pay := func(ctx context.Context, box *inbox.Box, orderID string, charge func(ctx context.Context, key string) (string, error)) inbox.Action {
		msg := inbox.Message{ID: inbox.ID{Consumer: "payments.charge", Message: orderID}, Payload: []byte(orderID)}
		_, err := inbox.ProcessLeased(ctx, box, msg, func(ctx context.Context, lease *inbox.Lease) (string, error) {
			receipt, err := inbox.Step(ctx, lease, "charge", func(ctx context.Context) (string, error) {
				return charge(ctx, lease.ID().Message)
			})
			if err != nil {
				return "", err
			}
			return inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (string, error) {
				_, err := tx.Exec(ctx, `update orders set receipt = $2 where id = $1`, orderID, receipt)
				return receipt, err
			})
		})
		return inbox.Disposition(err)
	}
	_ = pay
}

// A batch handler queues its statements into one pgx.Batch, so that fifty messages take three round trips.
func ExampleProcessBatch() {
	consume := func(ctx context.Context, box *inbox.Box, msgs []inbox.Message) {
		answers := inbox.ProcessBatch(ctx, box, msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]inbox.Void, error) {
			var batch pgx.Batch
			for _, m := range msgs {
				batch.Queue(`insert into order_view (id, body) values ($1, $2)`, m.ID.Message, m.Payload)
			}
			return nil, tx.SendBatch(ctx, &batch).Close()
		})
		for i, answer := range answers {
			fmt.Println(msgs[i].ID, inbox.Disposition(answer.Err).Verdict)
		}
	}
	_ = consume
}

// Where the caller rolls back, the failure is recorded afterwards; its answer is what the delivery is settled by.
func ExampleRecordFailure() {
	consume := func(ctx context.Context, pool *pgxpool.Pool, box *inbox.Box, msg inbox.Message, work func(ctx context.Context, tx pgx.Tx) error) inbox.Action {
		err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			_, err := inbox.Handle(ctx, tx, msg.ID, func(ctx context.Context) (inbox.Void, error) {
				return inbox.Void{}, work(ctx, tx)
			}, inbox.Using(box))
			return err // BeginFunc rolls back on it
		})
		if err != nil {
			err = inbox.RecordFailure(ctx, box, msg, err)
		}
		return inbox.Disposition(err)
	}
	_ = consume
}

// Policies are loaded before the first message and followed beside the consumers. An operator changes them from SQL, or as
// here from Go.
func ExamplePolicies() {
	serve := func(ctx context.Context, pool *pgxpool.Pool, front *cache.Cache, consume func(context.Context, *inbox.Box)) error {
		policies, err := inbox.NewPolicies(pool, inbox.PoliciesConfig{})
		if err != nil {
			return err
		}
		if err := policies.Load(ctx); err != nil {
			return err
		}
		following, stop := context.WithCancel(context.WithoutCancel(ctx))
		ended := make(chan error, 1)
		go func() { ended <- policies.Run(following) }()
		box, err := inbox.New(pool, inbox.Config{Policies: policies, Cache: front, Guard: front})
		if err == nil {
			consume(ctx, box)
		}
		stop() // after the last call of the box
		return errors.Join(err, <-ended)
	}
	change := func(ctx context.Context, policies *inbox.Policies) error {
		policy := inbox.Policy{Mode: inbox.ModeDouble, Retention: 30 * 24 * time.Hour} // the rest is inherited
		_, err := policies.Set(ctx, "payments.charge", policy, "duplicates are frequent")
		return err
	}
	_, _ = serve, change
}
