package main

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/optimistic"
)

// item is what is in stock of one sku.
type item struct {
	SKU       string
	Available int
	Version   int64
}

// reserveLocked takes the goods of an order with row locks: the rows are locked, in the order of their keys, before they
// are looked at. An order waits for the one before it, and never has to try again.
func reserveLocked(ctx context.Context, tx pgx.Tx, o order) (answer, error) {
	skus, wanted := o.wanted()
	stock, err := read(ctx, tx, `select sku, available, version from stock where sku = any ($1) order by sku for no key update`, skus)
	if err != nil {
		return answer{}, err
	}
	found := decide(stock, wanted, len(skus))
	if found.Reserved {
		for _, i := range stock {
			_, err := tx.Exec(ctx, `update stock set available = available - $2, version = version + 1 where sku = $1`, i.SKU, wanted[i.SKU])
			if err != nil {
				return answer{}, err
			}
		}
	}
	return found, record(ctx, tx, o, found)
}

// reserveOptimistic takes the goods of an order by version: it looks at the rows without a lock and changes each only if
// it is still what was looked at. If not, the error is a conflict, and the caller tries again from the start.
func reserveOptimistic(ctx context.Context, tx pgx.Tx, o order) (answer, error) {
	skus, wanted := o.wanted()
	stock, err := read(ctx, tx, `select sku, available, version from stock where sku = any ($1) order by sku`, skus)
	if err != nil {
		return answer{}, err
	}
	found := decide(stock, wanted, len(skus))
	if found.Reserved {
		for _, i := range stock {
			row := optimistic.Row{Look: `select version from stock where sku = $1`, Key: []any{i.SKU}}
			_, err := optimistic.Exec(ctx, tx, row, i.Version,
				`update stock set available = available - $3, version = version + 1 where sku = $1 and version = $2 returning version`, wanted[i.SKU])
			if err != nil {
				return answer{}, err
			}
		}
	}
	return found, record(ctx, tx, o, found)
}

func read(ctx context.Context, tx pgx.Tx, sql string, skus []string) ([]item, error) {
	rows, err := tx.Query(ctx, sql, skus)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[item])
}

// decide says whether there is enough of every item.
func decide(stock []item, wanted map[string]int, items int) answer {
	if len(stock) < items {
		return answer{Missing: "an item that is not known"}
	}
	for _, i := range stock {
		if wanted[i.SKU] > i.Available {
			return answer{Missing: i.SKU}
		}
	}
	return answer{Reserved: true}
}

// record writes the decision and the lines. The keys of both tables come from the order, so that what no inbox remembers
// any more is refused by them.
func record(ctx context.Context, tx pgx.Tx, o order, found answer) error {
	var batch pgx.Batch
	batch.Queue(`insert into orders (id, reserved, missing) values ($1, $2, nullif($3, ''))`, o.ID, found.Reserved, found.Missing)
	if found.Reserved {
		for n, l := range o.Lines {
			batch.Queue(`insert into order_line (order_id, line, sku, quantity) values ($1, $2, $3, $4)`, o.ID, n+1, l.SKU, l.Quantity)
		}
	}
	err := tx.SendBatch(ctx, &batch).Close()
	var pg *pgconn.PgError
	if errors.As(err, &pg) && pg.ConstraintName == "orders_pkey" {
		return inbox.Permanent(errDecidedLongAgo) // a person looks at it; trying again would change nothing
	}
	return err
}

var errDecidedLongAgo = errors.New("the order was decided before, and the inbox has forgotten it")
