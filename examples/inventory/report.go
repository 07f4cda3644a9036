package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
	"github.com/commitbox/commitbox/inbox"
)

var (
	//go:embed tables.sql
	tables string
	//go:embed count.sql
	countSQL string
)

// The two ways of taking goods.
const (
	rowLocks  = "row locks"
	byVersion = "by version"
)

// effects is what the business tables say.
type effects struct {
	Reserved           int
	Rejected           int
	Undecided          int // orders without a decision
	Lines              int
	LinesMissing       int // lines of reserved orders that are not there
	LinesTooMany       int // lines that no reserved order has
	PiecesOff          int // difference between what was taken from stock and what the lines say
	Negative           int // items with less than nothing
	RejectedForNothing int // rejected, although there is enough of everything to this day
}

// report is what one way of selling ends with.
type report struct {
	way     string
	orders  int
	effects effects
	tally   *tally // of the sale
	late    *tally // of the copies that come when the inbox has forgotten
	changed bool   // by those copies
	stock   []shelf
	seconds float64
}

type shelf struct {
	SKU                  string
	Delivered, Available int
}

// sell runs one sale in a database of its own.
func sell(ctx context.Context, databaseURL, way string, orders []order) (_ *report, err error) {
	db, err := exampledb.Create(ctx, databaseURL, tables)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, db.Drop()) }()
	r := &report{way: way, orders: len(orders), tally: &tally{}, late: &tally{}}
	began := time.Now()
	if err := r.deliver(ctx, db.Pool, r.tally, orders, copies); err != nil {
		return nil, err
	}
	r.seconds = time.Since(began).Seconds()
	if r.effects, err = count(ctx, db.Pool, orders); err != nil {
		return nil, err
	}

	// A copy that comes after retention has removed the rows of the inbox.
	if _, err := db.Exec(ctx, `delete from commitbox.inbox`); err != nil {
		return nil, err
	}
	if err := r.deliver(ctx, db.Pool, r.late, orders, 1); err != nil {
		return nil, err
	}
	after, err := count(ctx, db.Pool, orders)
	if err != nil {
		return nil, err
	}
	r.changed = after != r.effects
	rows, err := db.Query(ctx, `select sku, delivered, available from stock order by sku`)
	if err != nil {
		return nil, err
	}
	r.stock, err = pgx.CollectRows(rows, pgx.RowToStructByPos[shelf])
	return r, err
}

func (r *report) deliver(ctx context.Context, pool *pgxpool.Pool, c *tally, orders []order, copies int) error {
	box, err := newBox(pool)
	if err != nil {
		return err
	}
	if r.way == byVersion {
		return c.deliver(ctx, orders, copies, versioned(pool, box, c.breaking(reserveOptimistic)))
	}
	return c.deliver(ctx, orders, copies, locking(box, c.breaking(reserveLocked)))
}

// newBox leaves out what a run with faults is full of: orders that need a person.
func newBox(pool *pgxpool.Pool) (*inbox.Box, error) {
	return inbox.New(pool, inbox.Config{Logger: slog.New(slog.DiscardHandler)})
}

// querier is a pool or a transaction.
type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

func count(ctx context.Context, db querier, orders []order) (effects, error) {
	var ids, of, skus []string
	var numbers, quantities []int
	for _, o := range orders {
		ids = append(ids, o.ID)
		for n, l := range o.Lines {
			of, numbers, skus, quantities = append(of, o.ID), append(numbers, n+1), append(skus, l.SKU), append(quantities, l.Quantity)
		}
	}
	rows, err := db.Query(ctx, countSQL, ids, of, numbers, skus, quantities)
	if err != nil {
		return effects{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByName[effects])
}

// show writes the table of both.
func show(w io.Writer, reports []*report) {
	row := func(label string, value func(r *report) any) {
		fmt.Fprintf(w, "  %-44s", label)
		for _, r := range reports {
			fmt.Fprintf(w, " %12v", value(r))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintln(w)
	row("", func(r *report) any { return r.way })
	row("orders reserved", func(r *report) any { return r.effects.Reserved })
	row("orders rejected, because something was sold out", func(r *report) any { return r.effects.Rejected })
	row("copies that got the first copy's answer", func(r *report) any { return r.tally.replayed.Load() })
	row("copies that came while the first one ran", func(r *report) any { return r.tally.busy.Load() })
	row("connections lost with the goods in hand", func(r *report) any { return r.tally.crashes.Load() })
	row("conflicts, read and tried again", func(r *report) any { return r.tally.conflicts.Load() })
	row("handlers started", func(r *report) any { return r.tally.runs.Load() })
	row("seconds", func(r *report) any { return fmt.Sprintf("%.2f", r.seconds) })
	fmt.Fprintln(w)
	row("items below zero", func(r *report) any { return r.effects.Negative })
	row("lines lost", func(r *report) any { return r.effects.LinesMissing })
	row("lines counted twice", func(r *report) any { return r.effects.LinesTooMany })
	row("pieces taken and not sold, or sold and not taken", func(r *report) any { return r.effects.PiecesOff })
	row("orders without an answer, or with two", func(r *report) any { return int64(r.effects.Undecided) + r.tally.differing.Load() })
	row("orders rejected for nothing", func(r *report) any { return r.effects.RejectedForNothing })
	row("copies refused by a key, the inbox being empty", func(r *report) any { return r.late.dead.Load() })
	fmt.Fprintln(w)
	for _, r := range reports {
		for _, s := range r.stock {
			fmt.Fprintf(w, "  %-10s  %-6s %s%s %2d of %d left\n", r.way, s.SKU,
				strings.Repeat("▒", s.Delivered-s.Available), strings.Repeat("█", max(s.Available, 0)), s.Available, s.Delivered)
		}
	}
}

// verdict is an error if the sale did not show what it should.
func (r *report) verdict() error {
	var errs []error
	demand := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(r.way+": "+format, args...))
		}
	}
	e := r.effects
	demand(e.Negative == 0, "%d items are below zero", e.Negative)
	demand(e.LinesMissing == 0 && e.LinesTooMany == 0, "%d lines are lost, %d are counted twice", e.LinesMissing, e.LinesTooMany)
	demand(e.PiecesOff == 0, "the stock is wrong by %d pieces", e.PiecesOff)
	demand(e.Undecided == 0 && e.Reserved+e.Rejected == r.orders, "%d of %d orders were decided", e.Reserved+e.Rejected, r.orders)
	demand(e.RejectedForNothing == 0, "%d orders were rejected for nothing", e.RejectedForNothing)
	demand(r.tally.differing.Load() == 0, "%d copies heard another answer", r.tally.differing.Load())
	demand(r.tally.dead.Load() == 0, "%d orders were given up: something reached the last line of defence", r.tally.dead.Load())
	demand(r.late.dead.Load() == int64(r.orders) && !r.changed, "late copies did something: %d of %d were refused", r.late.dead.Load(), r.orders)
	demand(e.Reserved > 0 && e.Rejected > 0 && r.tally.crashes.Load() > 0, "no fault, or nothing to decide: this run proves nothing")
	demand(r.tally.executed.Load()+r.tally.replayed.Load() == int64(copies*r.orders), "not every copy has its answer")
	return errors.Join(errs...)
}
