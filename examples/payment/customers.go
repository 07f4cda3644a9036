package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/examples/payment/saga"
	"github.com/commitbox/commitbox/examples/payment/shop"
)

// warehouse is what is in stock. Whatever is made of glass breaks as soon as it is set aside.
const warehouse = `
	insert into stock (sku, price, on_hand) values ('apple', 100, 1000000), ('palace', 500000, 1000), ('unicorn', 900, 0);
	create function breaks() returns trigger language plpgsql as $$begin
		update stock s set on_hand = 0 from order_line l where l.order_id = new.id and s.sku = l.sku and s.sku like 'glass-%';
		return null;
	end$$;
	create trigger breaks after update of stock on orders for each row when (new.stock = 'reserved') execute function breaks();`

// purchase is an order and how it has to end.
type purchase struct {
	id, end string
	apples  int
	amount  int
}

// kinds are what customers buy, by how it ends.
var kinds = []struct {
	what  string
	end   string
	lines []shop.Line // glass gets a number
}{
	{"an apple", saga.Confirmed, []shop.Line{{SKU: "apple", Quantity: 1}}},
	{"a glass, which breaks", saga.Refunded, []shop.Line{{SKU: "apple", Quantity: 2}, {SKU: "glass", Quantity: 1}}},
	{"two lines of apples", saga.Confirmed, []shop.Line{{SKU: "apple", Quantity: 2}, {SKU: "apple", Quantity: 3}}},
	{"a palace, without cover", saga.Declined, []shop.Line{{SKU: "palace", Quantity: 1}, {SKU: "apple", Quantity: 1}}},
	{"a unicorn, sold out", saga.Refused, []shop.Line{{SKU: "unicorn", Quantity: 1}, {SKU: "apple", Quantity: 1}}},
}

// customers place orders over HTTP, and send a request again when they have no answer, or by mistake.
type customers struct {
	shop      string
	client    *http.Client
	pool      *pgxpool.Pool
	purchases []purchase
}

// buy places one order of a kind.
func (c *customers) buy(ctx context.Context, kind int) error {
	n := len(c.purchases)
	var order shop.Order
	bought := purchase{end: kinds[kind].end}
	for _, line := range kinds[kind].lines {
		if line.SKU == "glass" {
			line.SKU = fmt.Sprintf("glass-%d", n)
			if _, err := c.pool.Exec(ctx, `insert into stock (sku, price, on_hand) values ($1, 700, 1)`, line.SKU); err != nil {
				return err
			}
		}
		if line.SKU == "apple" && bought.end == saga.Confirmed {
			bought.apples += line.Quantity
		}
		order.Lines = append(order.Lines, line)
	}
	placed, err := c.place(ctx, fmt.Sprintf("order-%d", n), order)
	if err == nil && n%3 == 0 { // a nervous finger
		var again shop.Placed
		if again, err = c.place(ctx, fmt.Sprintf("order-%d", n), order); err == nil && again != placed {
			err = fmt.Errorf("the repeated request gave order %s, not %s", again.ID, placed.ID)
		}
	}
	bought.id, bought.amount = placed.ID, placed.Amount
	c.purchases = append(c.purchases, bought)
	return err
}

// place sends the request until it has an answer.
func (c *customers) place(ctx context.Context, key string, order shop.Order) (placed shop.Placed, err error) {
	body, err := json.Marshal(order)
	if err != nil {
		return placed, err
	}
	for range 50 {
		var status int
		status, err = c.send(ctx, key, body, &placed)
		if err == nil && status == http.StatusAccepted {
			return placed, nil
		}
		err = errors.Join(err, fmt.Errorf("the shop answered with %d", status))
		select {
		case <-ctx.Done():
			return placed, context.Cause(ctx)
		case <-time.After(100 * time.Millisecond):
		}
	}
	return placed, err
}

func (c *customers) send(ctx context.Context, key string, body []byte, answer *shop.Placed) (status int, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, c.shop+"/orders", bytes.NewReader(body))
	if err != nil {
		return 0, err
	}
	r.Header.Set("Customer", "erika")
	r.Header.Set("Idempotency-Key", `"`+key+`"`)
	resp, err := c.client.Do(r)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusAccepted {
		return resp.StatusCode, nil
	}
	return resp.StatusCode, json.NewDecoder(resp.Body).Decode(answer)
}
