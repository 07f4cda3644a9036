package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/httpidem"
	"github.com/commitbox/commitbox/outbox"
)

const tables = `
	create table orders (id bigint generated always as identity primary key, customer text not null, sku text not null,
		quantity integer not null check (quantity > 0));`

// newAPI returns the order service. The three things that make a repeat harmless are in here: the middleware, the customer
// as the scope of a key, and the transaction that the handler gets.
func newAPI(pool *pgxpool.Pool) (http.Handler, error) {
	once, err := httpidem.New(pool, httpidem.Config{
		Name:          "orders",
		Scope:         customer,
		AllowUnquoted: true, // for clients from before the draft
		Docs:          "https://shop.example/docs/idempotency",
	})
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("POST /orders", once.Handle(placeOrder))
	return mux, nil
}

// customer is who sends the request. A real service takes it from the session or the token that it has verified; this one
// has three customers, whose tokens are their names.
func customer(r *http.Request) (string, error) {
	switch token := r.Header.Get("Authorization"); token {
	case "Bearer alice", "Bearer bob", "Bearer carol":
		return token[len("Bearer "):], nil
	}
	return "", errors.New("no valid token")
}

// placeOrder writes the order and its message. Both are committed with the key and the response, or none of it is.
func placeOrder(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
	var order struct {
		SKU      string `json:"sku"`
		Quantity int    `json:"quantity"`
	}
	if err := json.NewDecoder(r.Body).Decode(&order); err != nil || order.Quantity < 1 || order.SKU == "" {
		return reply(w, http.StatusBadRequest, map[string]any{"error": "an order needs sku and quantity"})
	}
	if order.SKU == "flood" { // stands for a service that is short of something: nothing is kept, a repeat asks again
		w.Header().Set("Retry-After", "30")
		return reply(w, http.StatusTooManyRequests, map[string]any{"error": "too many orders for this item"})
	}
	who, err := customer(r)
	if err != nil {
		return err
	}
	var id int64
	err = tx.QueryRow(r.Context(), `insert into orders (customer, sku, quantity) values ($1, $2, $3) returning id`,
		who, order.SKU, order.Quantity).Scan(&id)
	if err != nil {
		return err
	}
	number := strconv.FormatInt(id, 10)
	_, err = outbox.Enqueue(r.Context(), tx, outbox.Message{Topic: "orders.placed", Key: number, Payload: []byte(number)})
	if err != nil {
		return err
	}
	w.Header().Set("Location", "/orders/"+number)
	http.SetCookie(w, &http.Cookie{Name: "last-order", Value: number}) // never given to a repeat
	return reply(w, http.StatusCreated, map[string]any{"order": id, "sku": order.SKU, "quantity": order.Quantity})
}

func reply(w http.ResponseWriter, status int, body map[string]any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		return fmt.Errorf("write the response: %w", err)
	}
	return nil
}
