package saga

import (
	"context"
	_ "embed"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"
)

// Tables are the tables of orders and stock.
//
//go:embed tables.sql
var Tables string

// What orders.stock says.
const (
	stockNone     = "none"
	stockReserved = "reserved"
	stockTaken    = "taken"
	stockShort    = "short"
	stockReleased = "released"
	stockRefused  = "refused"
)

// What moves stock. Each statement touches every SKU of the order, with the sum of its lines; one that touches fewer found too
// little and is undone. The condition stands in the update, so no decision is made from what was read before.
const (
	moveReserve = `update stock s set reserved = s.reserved + o.quantity from order_sku o
		where o.order_id = $1 and s.sku = o.sku and s.on_hand - s.reserved >= o.quantity`
	moveTake = `update stock s set reserved = s.reserved - o.quantity, on_hand = s.on_hand - o.quantity from order_sku o
		where o.order_id = $1 and s.sku = o.sku and s.on_hand >= o.quantity`
	moveRelease = `update stock s set reserved = s.reserved - o.quantity from order_sku o
		where o.order_id = $1 and s.sku = o.sku`
)

// reserve sets the goods aside, or finds that they are sold out.
func (w *Worker) reserve(ctx context.Context, orderID string) (state string, err error) {
	err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if state, err = w.lock(ctx, tx, orderID); err != nil || state != stockNone {
			return err // decided before
		}
		enough, err := move(ctx, tx, orderID, moveReserve)
		if err != nil {
			return err
		}
		state = stockRefused
		if enough {
			state = stockReserved
		}
		return decide(ctx, tx, orderID, state)
	})
	return state, err
}

// deduct takes the reserved goods, or finds that they are gone and gives the reservation back.
func (w *Worker) deduct(ctx context.Context, orderID string) (state string, err error) {
	err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		if state, err = w.lock(ctx, tx, orderID); err != nil || state != stockReserved {
			return err // decided before
		}
		enough, err := move(ctx, tx, orderID, moveTake)
		if err != nil {
			return err
		}
		state = stockTaken
		if !enough {
			state = stockShort
			if _, err := move(ctx, tx, orderID, moveRelease); err != nil {
				return err
			}
		}
		return decide(ctx, tx, orderID, state)
	})
	if err == nil && state != stockTaken && state != stockShort {
		err = fmt.Errorf("the stock of order %s is %s and cannot be taken", orderID, state)
	}
	return state, err
}

// release gives a reservation back, in an order that is locked.
func release(ctx context.Context, tx pgx.Tx, orderID string) error {
	if _, err := move(ctx, tx, orderID, moveRelease); err != nil {
		return err
	}
	return decide(ctx, tx, orderID, stockReleased)
}

// lock keeps every other copy of the work out until the transaction ends, and says what was decided before. A process that
// then stands still (a suspended machine, a network that swallows packets) would hold the goods of its order, and with them
// everybody who wants the same, so PostgreSQL is told to end its session after a while.
func (w *Worker) lock(ctx context.Context, tx pgx.Tx, orderID string) (state string, err error) {
	idle := strconv.FormatInt(w.cfg.IdleMax.Milliseconds(), 10)
	err = tx.QueryRow(ctx, `select stock from orders, set_config('idle_in_transaction_session_timeout', $2, true)
		where id = $1 for update of orders`, orderID, idle).Scan(&state)
	if err != nil {
		err = fmt.Errorf("lock order %s: %w", orderID, err)
	}
	return state, err
}

func decide(ctx context.Context, tx pgx.Tx, orderID, state string) error {
	_, err := tx.Exec(ctx, `update orders set stock = $2 where id = $1`, orderID, state)
	return err
}

// move runs one of the statements above for all SKUs of the order, or for none. It locks their rows in order first, so that two
// orders with the same SKUs do not block each other for good.
func move(ctx context.Context, tx pgx.Tx, orderID, statement string) (all bool, err error) {
	_, err = tx.Exec(ctx, `select from stock where sku in (select sku from order_line where order_id = $1) order by sku for update`, orderID)
	if err != nil {
		return false, err
	}
	part, err := tx.Begin(ctx) // a savepoint
	if err != nil {
		return false, err
	}
	defer part.Rollback(context.WithoutCancel(ctx))
	tag, err := part.Exec(ctx, statement, orderID)
	if err != nil {
		return false, err
	}
	var skus int64
	if err := part.QueryRow(ctx, `select count(*) from order_sku where order_id = $1`, orderID).Scan(&skus); err != nil {
		return false, err
	}
	if tag.RowsAffected() != skus {
		return false, nil
	}
	return true, part.Commit(ctx)
}
