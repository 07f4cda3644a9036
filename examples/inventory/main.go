// Command inventory sells the last items of a shop to a crowd that wants more than there is, twice: once with row locks and
// once by version. Every order is delivered several times at once, and connections are lost on the way. At the end it
// counts, in the business tables, what was sold.
//
// The two ways of taking goods are in reserve.go and their services in service.go; they are what a real program would hold.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strconv"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := start(ctx, os.Getenv("DATABASE_URL"), os.Getenv("ORDERS"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "inventory:", err)
		stop()
		os.Exit(1)
	}
}

func start(ctx context.Context, databaseURL, orders string, out io.Writer) error {
	n := 50
	if orders != "" {
		var err error
		if n, err = strconv.Atoi(orders); err != nil || n < 50 || n > 1000 {
			return fmt.Errorf("ORDERS must be a number from 50 to 1000, not %q", orders)
		}
	}
	if databaseURL == "" {
		return errors.New("DATABASE_URL is missing; `make example NAME=inventory` sets it")
	}
	return run(ctx, databaseURL, newOrders(n), out)
}

// run sells the stock in both ways, each in a database of its own, and shows them side by side.
func run(ctx context.Context, databaseURL string, orders []order, out io.Writer) error {
	fmt.Fprintf(out, "%d orders for the last 75 pieces. Each is delivered %d times at once, and every fifth\nof those that get their goods loses the connection before they are committed.\n", len(orders), copies)
	var reports []*report
	for _, way := range []string{rowLocks, byVersion} {
		r, err := sell(ctx, databaseURL, way, orders)
		if err != nil {
			return fmt.Errorf("%s: %w", way, err)
		}
		reports = append(reports, r)
	}
	show(out, reports)
	return errors.Join(reports[0].verdict(), reports[1].verdict())
}
