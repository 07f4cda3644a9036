package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// transfer moves money between two accounts, which may be in different databases.
type transfer struct {
	ID, From, To string
	Amount       int64
}

// The inbox consumers, each with rows of its own.
const (
	paying    = "transfers.pay"
	crediting = "transfers.credit"
)

// pay handles the command: in the payer's database, and in one transaction, it takes the money and says so in a message.
func (s shards) pay(ctx context.Context, msg inbox.Message) error {
	t, err := decode(msg)
	if err != nil {
		return err
	}
	msg.ID.Consumer = paying
	_, err = inbox.Process(ctx, s.of(t.From).box, msg, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		tag, err := tx.Exec(ctx, `update account set balance = balance - $2 where name = $1 and balance >= $2`, t.From, t.Amount)
		if err != nil {
			return inbox.Void{}, err
		}
		if tag.RowsAffected() == 0 {
			return inbox.Void{}, inbox.Permanent(errors.New("the money is not there"))
		}
		if _, err := tx.Exec(ctx, `insert into sent values ($1, $2, $3, $4)`, t.ID, t.From, t.To, t.Amount); err != nil {
			return inbox.Void{}, err
		}
		_, err = outbox.Enqueue(ctx, tx, outbox.Message{Topic: "money.sent", Key: t.To, Payload: msg.Payload})
		return inbox.Void{}, err
	})
	return err
}

// credit handles the message: in the payee's database, whichever relay it came from.
func (s shards) credit(ctx context.Context, msg inbox.Message) error {
	t, err := decode(msg)
	if err != nil {
		return err
	}
	msg.ID.Consumer = crediting
	_, err = inbox.Process(ctx, s.of(t.To).box, msg, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		if _, err := tx.Exec(ctx, `update account set balance = balance + $2 where name = $1`, t.To, t.Amount); err != nil {
			return inbox.Void{}, err
		}
		_, err := tx.Exec(ctx, `insert into arrived values ($1, $2, $3)`, t.ID, t.To, t.Amount)
		return inbox.Void{}, err
	})
	return err
}

func decode(msg inbox.Message) (t transfer, err error) {
	if err := json.Unmarshal(msg.Payload, &t); err != nil {
		return t, fmt.Errorf("decode transfer %s: %w", msg.ID.Message, err)
	}
	return t, nil
}
