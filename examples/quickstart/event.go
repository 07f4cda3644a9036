package main

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

// The topics. Messages of one order carry its id as key, so placed is published before paid.
const (
	ordersPlaced = "orders.placed"
	ordersPaid   = "orders.paid"
)

// event is the payload of both topics.
type event struct {
	Type     string `json:"type"` // the topic
	OrderID  string `json:"order_id"`
	SKU      string `json:"sku"`
	Quantity int    `json:"quantity"`
	Amount   int    `json:"amount"` // cents
}

func (e event) encode() ([]byte, error) { return json.Marshal(e) }

func decodeEvent(payload []byte) (event, error) {
	var e event
	if err := json.Unmarshal(payload, &e); err != nil {
		return e, fmt.Errorf("decode event: %w", err)
	}
	return e, nil
}

// handler is a consumer's work: what it writes in tx is committed together with the inbox row, once per message.
type handler func(ctx context.Context, tx pgx.Tx, msg inbox.Message) error
