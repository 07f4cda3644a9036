package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
)

// effects counts what the services did, from their tables alone.
//
//go:embed effects.sql
var effectsSQL string

type effects struct {
	Orders          int
	Payments        int // rows
	Unpaid          int // orders without a payment
	PaidAgain       int // payments beyond the first of an order
	TimelineMissing int // events of orders that are not in the timeline
	TimelineAgain   int // rows beyond the first of an event
	StockMissing    int // pieces that were sold and not taken from stock
	StockAgain      int // pieces that were taken beyond those sold
	Dead            int // messages given up by the relay or an inbox
}

// report is what a run ends with. Its JSON form is the last line of the output.
type report struct {
	Orders             int     `json:"orders"`
	Delivered          int     `json:"delivered"`           // messages that the broker confirmed
	Received           int     `json:"received"`            // deliveries that reached an inbox
	DuplicatesReceived int     `json:"duplicates_received"` // of these, deliveries of what was handled before
	Effects            int     `json:"effects"`             // payments
	Lost               int     `json:"lost"`                // effects that are missing
	DoubleEffects      int     `json:"double_effects"`      // effects beyond the first
	Seconds            float64 `json:"seconds"`

	copies, kills, stalls int
	effects               effects
}

func (d *demo) report(ctx context.Context) (*report, error) {
	rows, err := d.db.Query(ctx, effectsSQL)
	if err != nil {
		return nil, err
	}
	e, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[effects])
	if err != nil {
		return nil, err
	}
	c := d.tally.counts()
	return &report{
		Orders:             d.cfg.Orders,
		Delivered:          c.Delivered,
		Received:           c.Received,
		DuplicatesReceived: c.Duplicates,
		Effects:            e.Payments,
		Lost:               d.cfg.Orders - e.Orders + e.Unpaid + e.TimelineMissing + e.StockMissing,
		DoubleEffects:      e.PaidAgain + e.TimelineAgain + e.StockAgain,
		Seconds:            math.Round(time.Since(d.started).Seconds()*10) / 10,
		copies:             c.Copies,
		kills:              d.components.kills,
		stalls:             d.components.stalls,
		effects:            e,
	}, nil
}

// write writes the table and the JSON line.
func (r *report) write(w io.Writer) error {
	rows := []struct {
		label string
		value int
	}{
		{"orders placed", r.effects.Orders},
		{"messages confirmed by the broker", r.Delivered},
		{"confirmed publishes, copies included", r.copies},
		{"deliveries received by the inboxes", r.Received},
		{"  of which handled before", r.DuplicatesReceived},
		{"components killed and restarted", r.kills},
		{"stalled relays replaced", r.stalls},
		{"messages given up", r.effects.Dead},
		{"payments", r.effects.Payments},
		{"  orders without a payment", r.effects.Unpaid},
		{"  payments beyond the first of an order", r.effects.PaidAgain},
		{"timeline: events missing", r.effects.TimelineMissing},
		{"timeline: events twice", r.effects.TimelineAgain},
		{"stock: pieces not taken", r.effects.StockMissing},
		{"stock: pieces taken twice", r.effects.StockAgain},
	}
	fmt.Fprintln(w)
	for _, row := range rows {
		fmt.Fprintf(w, "  %-42s %9d\n", row.label, row.value)
	}
	fmt.Fprintf(w, "  %-42s %9.1f\n\n", "seconds", r.Seconds)
	return json.NewEncoder(w).Encode(r)
}

// verdict is an error if the run did not show what it should.
func (r *report) verdict() error {
	var errs []error
	if r.Lost != 0 {
		errs = append(errs, fmt.Errorf("%d effects were lost", r.Lost))
	}
	if r.DoubleEffects != 0 {
		errs = append(errs, fmt.Errorf("%d effects happened twice", r.DoubleEffects))
	}
	if r.DuplicatesReceived == 0 {
		errs = append(errs, errors.New("no duplicate arrived, so this run proves nothing"))
	}
	return errors.Join(errs...)
}
