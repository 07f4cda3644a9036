package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/examples/payment/provider"
	"github.com/commitbox/commitbox/examples/payment/saga"
)

// tally is what became of the orders with one end.
type tally struct{ orders, charges, refunds int }

// report is what a run ends with. What it says of money comes from the payment service, not from our tables.
type report struct {
	ends    map[string]tally
	ledger  provider.Ledger
	kills   int
	shops   int // kills of the shop
	resumed int // orders that needed more than one attempt
	seconds float64
	errs    []error
}

func (d *demo) report(ctx context.Context) (*report, error) {
	r := &report{ends: map[string]tally{}, kills: d.kills, shops: d.shopKills, seconds: time.Since(d.started).Seconds()}
	if err := r.readLedger(ctx, d); err != nil {
		return nil, err
	}
	status, err := d.statuses(ctx)
	if err != nil {
		return nil, err
	}
	ids, told, err := d.queues.events()
	if err != nil {
		return nil, err
	}
	charges, refunds := map[string][]int{}, map[string][]int{}
	for _, e := range r.ledger.Entries {
		if e.Amount > 0 {
			charges[e.OrderID] = append(charges[e.OrderID], e.Amount)
		} else {
			refunds[e.OrderID] = append(refunds[e.OrderID], -e.Amount)
		}
		if _, known := status[e.OrderID]; !known {
			r.wrong("money of %s, which nobody ordered", e.OrderID)
		}
	}
	for _, p := range d.purchases {
		t := r.ends[status[p.id]]
		t.orders++
		t.charges += len(charges[p.id])
		t.refunds += len(refunds[p.id])
		r.ends[status[p.id]] = t
		r.check(p, status[p.id], charges[p.id], refunds[p.id])
		if len(ids[p.id]) != 1 || told[p.id] != p.end {
			r.wrong("order %s has %d events, the last says %q", p.id, len(ids[p.id]), told[p.id])
		}
	}
	if len(status) != len(d.purchases) {
		r.wrong("%d orders were placed and %d are there", len(d.purchases), len(status))
	}
	return r, r.checkTables(ctx, d)
}

func (r *report) wrong(format string, args ...any) {
	r.errs = append(r.errs, fmt.Errorf(format, args...))
}

// check compares one order with what has to become of it: charged once, or charged and given back once, or never charged.
func (r *report) check(p purchase, status string, charges, refunds []int) {
	var wantCharges, wantRefunds []int
	if p.end == saga.Confirmed || p.end == saga.Refunded {
		wantCharges = []int{p.amount}
	}
	if p.end == saga.Refunded {
		wantRefunds = []int{p.amount}
	}
	if status != p.end || !slices.Equal(charges, wantCharges) || !slices.Equal(refunds, wantRefunds) {
		r.wrong("order %s is %s with charges %v and refunds %v; want %s, %v, %v", p.id, status, charges, refunds, p.end, wantCharges, wantRefunds)
	}
}

// checkTables counts the goods.
func (r *report) checkTables(ctx context.Context, d *demo) error {
	sold := 0
	for _, p := range d.purchases {
		sold += p.apples
	}
	var apples, reserved, palaces int
	err := d.db.QueryRow(ctx, `select (select 1000000 - on_hand from stock where sku = 'apple'), (select sum(reserved) from stock),
		(select 1000 - on_hand from stock where sku = 'palace'), (select count(*) from commitbox.inbox where attempts > 1)`).
		Scan(&apples, &reserved, &palaces, &r.resumed)
	if err == nil && (apples != sold || reserved != 0 || palaces != 0) {
		r.wrong("%d apples left the stock and %d were sold; %d pieces are still reserved; %d palaces are gone", apples, sold, reserved, palaces)
	}
	return err
}

func (d *demo) statuses(ctx context.Context) (map[string]string, error) {
	rows, err := d.db.Query(ctx, `select id, status from orders`)
	if err != nil {
		return nil, err
	}
	found := map[string]string{}
	var id, status string
	_, err = pgx.ForEachRow(rows, []any{&id, &status}, func() error {
		found[id] = status
		return nil
	})
	return found, err
}

func (r *report) readLedger(ctx context.Context, d *demo) error {
	q, err := http.NewRequestWithContext(ctx, http.MethodGet, d.provider+"/ledger", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := d.client.Do(q)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(&r.ledger)
}

func (r *report) write(out io.Writer) {
	fmt.Fprintf(out, "\n  %-44s %8s %8s %8s\n", "", "orders", "charged", "refunded")
	for _, row := range []struct{ end, text string }{
		{saga.Confirmed, "confirmed"},
		{saga.Refunded, "refunded: the goods broke"},
		{saga.Declined, "declined: no cover"},
		{saga.Refused, "refused: sold out"},
		{"open", "stuck"},
	} {
		t := r.ends[row.end]
		fmt.Fprintf(out, "  %-44s %8d %8d %8d\n", row.text, t.orders, t.charges, t.refunds)
	}
	fmt.Fprintf(out, "\n  %-44s %8d\n", "workers killed", r.kills)
	fmt.Fprintf(out, "  %-44s %8d\n", "shop and relay killed", r.shops)
	fmt.Fprintf(out, "  %-44s %8d\n", "orders that needed more than one attempt", r.resumed)
	fmt.Fprintf(out, "  %-44s %8d\n", "calls at the payment service", r.ledger.Calls)
	for _, name := range slices.Sorted(maps.Keys(r.ledger.Faults)) {
		fmt.Fprintf(out, "    %-42s %8d\n", name, r.ledger.Faults[name])
	}
	fmt.Fprintf(out, "  %-44s %8.1f\n\n", "seconds", r.seconds)
	if len(r.errs) == 0 {
		fmt.Fprintln(out, "  Every order was charged once, or given back once, or never charged. Every piece is accounted for.")
	}
}

// verdict is an error if anything is not as it should be.
func (r *report) verdict() error { return errors.Join(r.errs...) }
