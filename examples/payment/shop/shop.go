// Package shop is the HTTP API that takes orders. An order and the message that starts its payment are written in one
// transaction, and a client may send the request again: see package httpidem.
package shop

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/examples/payment/saga"
	"github.com/commitbox/commitbox/httpidem"
	"github.com/commitbox/commitbox/outbox"
)

// Line is a line of an order.
type Line struct {
	SKU      string `json:"sku"`
	Quantity int    `json:"quantity"`
}

// Order is what a client sends.
type Order struct {
	Lines []Line `json:"lines"`
}

// Placed is what it gets, and what GET /orders/{id} answers.
type Placed struct {
	ID     string `json:"id"`
	Amount int    `json:"amount"`
	Status string `json:"status"`
}

// New returns the API.
func New(pool *pgxpool.Pool) (http.Handler, error) {
	once, err := httpidem.New(pool, httpidem.Config{Name: "shop.orders", Scope: customer})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders", once.Handle(place))
	mux.HandleFunc("GET /orders/{id}", func(w http.ResponseWriter, r *http.Request) { show(w, r, pool) })
	return mux, nil
}

// customer is who sends the request. A real service takes it from a session or token that it has verified.
func customer(r *http.Request) (string, error) {
	name := r.Header.Get("Customer")
	if name == "" {
		return "", errors.New("no customer")
	}
	return name, nil
}

func place(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
	var order Order
	if err := json.NewDecoder(r.Body).Decode(&order); err != nil || !order.valid() {
		return reply(w, http.StatusBadRequest, map[string]string{"error": "an order has lines with sku and quantity"})
	}
	who, err := customer(r)
	if err != nil {
		return err
	}
	placed := Placed{ID: uuid.NewString(), Status: "open"}
	if placed.Amount, err = price(r.Context(), tx, order.Lines); err != nil {
		return err
	}
	if placed.Amount == 0 {
		return reply(w, http.StatusNotFound, map[string]string{"error": "there is no such item"})
	}
	if err := write(r.Context(), tx, who, placed, order.Lines); err != nil {
		return err
	}
	payload, err := json.Marshal(saga.Placed{OrderID: placed.ID, Amount: placed.Amount})
	if err != nil {
		return err
	}
	_, err = outbox.Enqueue(r.Context(), tx, outbox.Message{
		Topic: saga.TopicPlaced, Key: placed.ID, ContentType: "application/json", Payload: payload,
	})
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/orders/"+placed.ID)
	return reply(w, http.StatusAccepted, placed)
}

// The limits keep an amount within what a column and a card can hold.
const (
	linesMax    = 100
	quantityMax = 1000
)

func (o *Order) valid() bool {
	if len(o.Lines) == 0 || len(o.Lines) > linesMax {
		return false
	}
	for _, line := range o.Lines {
		if line.SKU == "" || line.Quantity < 1 || line.Quantity > quantityMax {
			return false
		}
	}
	return true
}

// price returns the sum in cents, or 0 if a SKU is unknown.
func price(ctx context.Context, tx pgx.Tx, lines []Line) (sum int, err error) {
	for _, line := range lines {
		var each int
		err := tx.QueryRow(ctx, `select price from stock where sku = $1`, line.SKU).Scan(&each)
		if errors.Is(err, pgx.ErrNoRows) {
			return 0, nil
		}
		if err != nil {
			return 0, err
		}
		sum += each * line.Quantity
	}
	return sum, nil
}

func write(ctx context.Context, tx pgx.Tx, who string, placed Placed, lines []Line) error {
	_, err := tx.Exec(ctx, `insert into orders (id, customer, amount) values ($1, $2, $3)`, placed.ID, who, placed.Amount)
	if err != nil {
		return err
	}
	for _, line := range lines {
		_, err := tx.Exec(ctx, `insert into order_line (order_id, sku, quantity) values ($1, $2, $3)`, placed.ID, line.SKU, line.Quantity)
		if err != nil {
			return err
		}
	}
	return nil
}

func show(w http.ResponseWriter, r *http.Request, pool *pgxpool.Pool) {
	who, err := customer(r)
	if err != nil {
		http.Error(w, "who are you?", http.StatusForbidden)
		return
	}
	placed := Placed{ID: r.PathValue("id")}
	err = pool.QueryRow(r.Context(), `select amount, status from orders where id = $1 and customer = $2`, placed.ID, who).
		Scan(&placed.Amount, &placed.Status)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		http.NotFound(w, r)
	case err != nil:
		http.Error(w, "try again", http.StatusServiceUnavailable)
	default:
		_ = reply(w, http.StatusOK, placed) // a client that is gone asks again
	}
}

func reply(w http.ResponseWriter, status int, body any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		return fmt.Errorf("write the response: %w", err)
	}
	return nil
}
