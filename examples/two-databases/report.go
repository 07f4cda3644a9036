package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
)

// report is what the business tables of all databases say.
type report struct {
	databases                  []balance
	sent, arrived, crossed     int
	lost, twice, misled, money int
}

type balance struct{ number, accounts, money, paid, credited int } // of one database

func (s shards) count(ctx context.Context) (*report, error) {
	r := &report{}
	paid, credited := map[string]int{}, map[string]int{} // times, by transfer
	for _, shard := range s {
		b := balance{number: shard.number}
		if err := shard.QueryRow(ctx, `select count(*), coalesce(sum(balance), 0)::bigint from account`).Scan(&b.accounts, &b.money); err != nil {
			return nil, err
		}
		payees, err := r.tell(ctx, s, shard, `select id, payer, payee from sent`, paid)
		if err != nil {
			return nil, err
		}
		for _, payee := range payees {
			if s.of(payee) != shard {
				r.crossed++
			}
		}
		credits, err := r.tell(ctx, s, shard, `select id, payee, payee from arrived`, credited)
		if err != nil {
			return nil, err
		}
		b.paid, b.credited = len(payees), len(credits)
		r.money += b.money
		r.databases = append(r.databases, b)
	}
	for id, n := range paid {
		r.sent++
		r.twice += n - 1
		if credited[id] == 0 {
			r.lost++
		}
	}
	for _, n := range credited {
		r.arrived++
		r.twice += n - 1
	}
	return r, nil
}

// tell counts the rows of a database by transfer, and those that do not belong there.
func (r *report) tell(ctx context.Context, s shards, in *shard, sql string, times map[string]int) (payees []string, err error) {
	rows, err := in.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	var id, owner, payee string
	_, err = pgx.ForEachRow(rows, []any{&id, &owner, &payee}, func() error {
		times[id]++
		payees = append(payees, payee)
		if s.of(owner) != in {
			r.misled++
		}
		return nil
	})
	return payees, err
}

func (r *report) show(w io.Writer, b *broker, f *fault) {
	for _, d := range r.databases {
		fmt.Fprintf(w, "  database %d   %2d accounts   %3d transfers paid   %3d credited   %6d in the accounts\n", d.number, d.accounts, d.paid, d.credited, d.money)
	}
	fmt.Fprintln(w)
	for _, row := range []struct {
		label string
		value any
	}{
		{"transfers paid", r.sent},
		{"  of which into another database", r.crossed},
		{"transfers credited", r.arrived},
		{"deliveries, copies included", b.delivered.Load()},
		{"  of which had to come again", b.again.Load()},
		{fmt.Sprintf("credited in database 1 while database %d was away", f.away.number), f.meanwhile},
		{"transfers lost", r.lost},
		{"paid or credited twice", r.twice},
		{"written into the wrong database", r.misled},
		{"money at the start", accounts * opening},
		{"money at the end", r.money},
	} {
		fmt.Fprintf(w, "  %-50s %7v\n", row.label, row.value)
	}
}

// verdict is an error if the run did not show what it should.
func (r *report) verdict(b *broker, f *fault) error {
	var errs []error
	demand := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	demand(r.sent == transfers && r.arrived == transfers && r.lost == 0, "%d of %d transfers were paid and %d credited; %d are lost", r.sent, transfers, r.arrived, r.lost)
	demand(r.twice == 0, "%d transfers were made twice", r.twice)
	demand(r.misled == 0, "%d rows are in the wrong database", r.misled)
	demand(r.money == accounts*opening, "there is %d of money, and was %d", r.money, accounts*opening)
	demand(b.refused.Load() == 0, "%d deliveries were refused", b.refused.Load())
	demand(r.crossed > 0 && b.again.Load() > 0 && b.delivered.Load() > 2*transfers, "no fault, or nothing to route: this run proves nothing")
	demand(f.meanwhile > 0, "the other database stood still while one was away")
	return errors.Join(errs...)
}
