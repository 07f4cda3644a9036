package main

import (
	"bytes"
	"context"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestA5_FiftyOrdersForTheLastItems(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := start(t.Context(), testenv.EmptyDatabase(t).URL, "", &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	t.Logf("\n%s", &out)
}

func TestStartRefusesWhatItCannotUse(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ url, orders, want string }{
		{"", "", "DATABASE_URL"}, {"nonsense", "", "DATABASE_URL"}, {"postgres://h/d", "many", "ORDERS"}, {"postgres://h/d", "49", "ORDERS"},
	} {
		if err := start(t.Context(), c.url, c.orders, new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func newDatabase(t *testing.T) *exampledb.DB {
	t.Helper()
	db, err := exampledb.Create(t.Context(), testenv.EmptyDatabase(t).URL, tables)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Drop(); err != nil {
			t.Error(err)
		}
	})
	return db
}

// Two lines of one order with one item both count, for the stock and for the decision.
func TestA5_TwoLinesWithOneItemBothCount(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	for name, take := range map[string]reserve{"locked": reserveLocked, "optimistic": reserveOptimistic} {
		if _, err := db.Exec(t.Context(), `update stock set available = 10 where sku = 'plums'`); err != nil {
			t.Fatal(err)
		}
		for _, step := range []struct {
			id   string
			want answer
			left int
		}{{name + "-1", answer{Reserved: true}, 4}, {name + "-2", answer{Missing: "plums"}, 4}} {
			o := order{ID: step.id, Lines: []line{{"plums", 3}, {"plums", 3}}}
			err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
				got, err := take(t.Context(), tx, o)
				if got != step.want {
					t.Errorf("%s: %+v, want %+v", o.ID, got, step.want)
				}
				return err
			})
			var left int
			if err := db.QueryRow(t.Context(), `select available from stock where sku = 'plums'`).Scan(&left); err != nil || left != step.left {
				t.Errorf("%s: %d plums are left, want %d (%v)", o.ID, left, step.left, err)
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// A service that looks without a lock and does not compare the version oversells, and the count shows it.
func TestA5_AnUnguardedSaleShows(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	var looked sync.WaitGroup
	looked.Add(2)
	unguarded := func(ctx context.Context, tx pgx.Tx, o order) (answer, error) {
		var available int
		if err := tx.QueryRow(ctx, `select available from stock where sku = 'plums'`).Scan(&available); err != nil {
			return answer{}, err
		}
		looked.Done()
		looked.Wait() // for the other one
		_, err := tx.Exec(ctx, `update stock set available = $1 where sku = 'plums'`, available-o.Lines[0].Quantity)
		if err != nil {
			return answer{}, err
		}
		return answer{Reserved: true}, record(ctx, tx, o, answer{Reserved: true})
	}
	orders := []order{{ID: "a", Lines: []line{{"plums", 6}}}, {ID: "b", Lines: []line{{"plums", 6}}}}
	box, err := newBox(db.Pool)
	if err != nil {
		t.Fatal(err)
	}
	r := &report{way: rowLocks, orders: 2, tally: &tally{}, late: &tally{}}
	if err := r.tally.deliver(t.Context(), orders, 1, locking(box, unguarded)); err != nil {
		t.Fatal(err)
	}
	if r.effects, err = count(t.Context(), db.Pool, orders); err != nil {
		t.Fatal(err)
	}
	if err := r.verdict(); r.effects.PiecesOff != 6 || err == nil || !strings.Contains(err.Error(), "wrong by 6 pieces") {
		t.Errorf("%+v, %v", r.effects, err)
	}
}

// TestEffectsAreCounted breaks the tables by hand.
func TestEffectsAreCounted(t *testing.T) {
	t.Parallel()
	db := newDatabase(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`alter table order_line drop constraint order_line_pkey; alter table stock drop constraint stock_available_check;
		insert into orders values ('a', true, null), ('b', false, 'plums');
		insert into order_line values ('a', 1, 'plums', 9), ('a', 2, 'plums', 1);
		update stock set available = 0 where sku = 'plums'`)
	orders := []order{{"a", []line{{"plums", 9}, {"plums", 1}}}, {"b", []line{{"plums", 1}}}}
	well := effects{Reserved: 1, Rejected: 1, Lines: 2}
	for _, step := range []struct {
		sql  string
		want func(*effects)
	}{
		{`select`, func(*effects) {}},
		{`insert into order_line values ('a', 2, 'plums', 2)`, func(e *effects) { e.Lines, e.LinesTooMany, e.PiecesOff = 3, 1, 2 }},
		{`delete from order_line where line = 2`, func(e *effects) { e.Lines, e.LinesMissing, e.PiecesOff = 1, 1, 1 }},
		{`update stock set available = -2 where sku = 'plums'`, func(e *effects) { e.Negative, e.PiecesOff = 1, 2 }},
		{`update stock set available = 1, delivered = 11 where sku = 'plums'`, func(e *effects) { e.RejectedForNothing = 1 }},
		{`delete from orders where id = 'b'`, func(e *effects) { e.Rejected, e.Undecided = 0, 1 }},
	} {
		err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(t.Context(), step.sql); err != nil {
				return err
			}
			want := well
			step.want(&want)
			if got, err := count(t.Context(), tx, orders); err != nil || got != want {
				t.Errorf("after %s: %+v, %v; want %+v", step.sql, got, err, want)
			}
			return pgx.ErrTxClosed // rolls back
		})
		if err != pgx.ErrTxClosed { //nolint:errorlint // it is the one from above
			t.Error(err)
		}
	}
}
