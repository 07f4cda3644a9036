package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
)

// order is the payload of a message. Its lines may name one item twice.
type order struct {
	ID    string
	Lines []line
}

type line struct {
	SKU      string
	Quantity int
}

// answer is what becomes of an order: everything is reserved, or nothing is.
type answer struct {
	Reserved bool
	Missing  string // the item that there was not enough of
}

// wanted adds up the lines of each item. The items come in one order, whoever asks, so that two orders that want the same
// items do not wait for each other.
func (o order) wanted() (items []string, quantity map[string]int) {
	quantity = map[string]int{}
	for _, l := range o.Lines {
		quantity[l.SKU] += l.Quantity
	}
	return slices.Sorted(maps.Keys(quantity)), quantity
}

func decode(payload []byte) (o order, err error) {
	if err := json.Unmarshal(payload, &o); err != nil {
		return o, fmt.Errorf("decode order: %w", err)
	}
	return o, nil
}

// newOrders makes orders that want more than there is. In every third one, two lines name the same item.
func newOrders(n int) []order {
	items := []string{"apples", "pears", "plums"}
	orders := make([]order, n)
	for i := range orders {
		first, second := items[i%3], items[(i/3)%3]
		if i%3 == 0 {
			second = first
		}
		orders[i] = order{ID: fmt.Sprintf("order-%02d", i+1), Lines: []line{{first, 1 + i%2}, {second, 1}}}
	}
	return orders
}
