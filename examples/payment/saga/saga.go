// Package saga takes an order from placed to paid, across a database and a payment service that do not share a transaction,
// and survives a crash at every point. Copy it into a service together with its tables.
//
//	reserve ─────▶ charge ─────▶ deduct ─────▶ confirm          orders.confirmed
//	   │              │             │
//	   │ sold out     │ declined    │ goods are gone
//	   ▼              ▼             ▼
//	refuse         release       refund ─────▶ close            orders.refused, .declined, .refunded
//
// What makes it safe, all of it in this package:
//
//   - The work runs under a lease of the inbox. When its process dies, the lease runs out, and the broker's next copy or the
//     completer ([Worker.Complete]) goes on behind the last stored step.
//   - A step may run twice: its process can die after the work and before its result is stored. So each step is harmless when
//     repeated. Steps in the database decide once, in the row of the order; steps at the payment service send a key that is
//     made of the order's id, so that the service recognises them.
//   - An answer that did not come (a timeout, a 500, a broken connection) decides nothing. The step ends with an error and is
//     sent again with the same key until the service says yes or no. Before the service forgets the key ([Config.KeysFor]) the
//     order is given to a person instead.
//   - The end of an order, its event and the end of the message are one transaction.
package saga

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// TopicPlaced is the topic of the message that starts the work; its payload is [Placed] as JSON.
const TopicPlaced = "orders.placed"

// Placed says that an order was placed.
type Placed struct {
	OrderID string `json:"order_id"`
	Amount  int    `json:"amount"` // cents
}

// The ends of an order. "orders." and the end is the topic of the event that tells of it.
const (
	Confirmed = "confirmed"
	Refunded  = "refunded"
	Declined  = "declined"
	Refused   = "refused"
)

// Ended is the event of an order's end.
type Ended struct {
	OrderID  string `json:"order_id"`
	Status   string `json:"status"`
	ChargeID string `json:"charge_id,omitempty"`
	RefundID string `json:"refund_id,omitempty"`
}

// handle is the work of one message: everything after the order was placed. It may be run again after any point of it.
// Step names are stored; they keep their meaning in every later version.
func (w *Worker) handle(ctx context.Context, lease *inbox.Lease, payload []byte) error {
	var order Placed
	if err := json.Unmarshal(payload, &order); err != nil || order.OrderID == "" {
		return inbox.Permanent(errors.New("the message is no placed order")) // nothing was done yet, so it can be given up
	}
	end := Ended{OrderID: order.OrderID}

	stock, err := inbox.Step(ctx, lease, "reserve", func(ctx context.Context) (string, error) {
		return w.reserve(ctx, order.OrderID)
	})
	if err != nil {
		return err
	}
	if stock == stockRefused {
		end.Status = Refused
		return w.finish(ctx, lease, end)
	}

	charge, err := inbox.Step(ctx, lease, "charge", func(ctx context.Context) (Charge, error) {
		if err := w.keyIsKnown(ctx, lease, "charge since"); err != nil {
			return Charge{}, err
		}
		return w.payments.charge(ctx, order)
	})
	if err != nil {
		return err // the card may have been charged: only the same key finds out
	}
	if charge.Declined {
		end.Status = Declined
		return w.finish(ctx, lease, end)
	}
	end.ChargeID = charge.ID

	stock, err = inbox.Step(ctx, lease, "deduct", func(ctx context.Context) (string, error) {
		return w.deduct(ctx, order.OrderID)
	})
	if err != nil {
		return err
	}
	if stock == stockTaken {
		end.Status = Confirmed
		return w.finish(ctx, lease, end)
	}

	refund, err := inbox.Step(ctx, lease, "refund", func(ctx context.Context) (Refund, error) {
		if err := w.keyIsKnown(ctx, lease, "refund since"); err != nil {
			return Refund{}, err
		}
		return w.payments.refund(ctx, order, charge)
	})
	if err != nil {
		return err // money is owed: this goes on until the service has answered
	}
	end.Status, end.RefundID = Refunded, refund.ID
	return w.finish(ctx, lease, end)
}

// keyIsKnown is asked before each call that moves money. It notes when the first one was made, and gives the order to a person
// before the payment service can have forgotten the key: the same key, sent after that, would be another charge.
func (w *Worker) keyIsKnown(ctx context.Context, lease *inbox.Lease, name string) error {
	since, err := inbox.Step(ctx, lease, name, func(ctx context.Context) (now time.Time, err error) {
		err = w.pool.QueryRow(ctx, `select clock_timestamp()`).Scan(&now)
		return now, err
	})
	if err != nil {
		return err
	}
	var known bool
	err = w.pool.QueryRow(ctx, `select clock_timestamp() < $1::timestamptz + make_interval(secs => $2)`, since, w.cfg.KeysFor.Seconds()).Scan(&known)
	if err == nil && !known {
		err = inbox.Permanent(errors.New("the payment service may have forgotten the key: ask it what it did, and end the order by hand"))
	}
	return err
}

// finish ends the order, tells of it and completes the message, in one transaction.
func (w *Worker) finish(ctx context.Context, lease *inbox.Lease, end Ended) error {
	_, err := inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (Ended, error) {
		stock, err := w.lock(ctx, tx, end.OrderID)
		if err == nil && end.Status == Declined && stock == stockReserved {
			err = release(ctx, tx, end.OrderID)
		}
		if err != nil {
			return end, err
		}
		tag, err := tx.Exec(ctx, `update orders set status = $2, charge_id = nullif($3, ''), refund_id = nullif($4, '')
			where id = $1 and status = 'open'`, end.OrderID, end.Status, end.ChargeID, end.RefundID)
		if err != nil {
			return end, err
		}
		if tag.RowsAffected() != 1 {
			return end, fmt.Errorf("order %s is not open", end.OrderID)
		}
		payload, err := json.Marshal(end)
		if err != nil {
			return end, err
		}
		_, err = outbox.Enqueue(ctx, tx, outbox.Message{
			Topic: "orders." + end.Status, Key: end.OrderID, ContentType: "application/json", Payload: payload,
		})
		return end, err
	})
	return err
}
