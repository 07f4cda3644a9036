package schema_test

import (
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/schema"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// Every way to send a statement reaches the chosen schema, with its arguments.
func TestOn(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	for _, name := range []string{"user", schema.Default} {
		n := parse(t, name)
		check := func(what string, err error) {
			t.Helper()
			if err != nil {
				t.Errorf("%s in schema %s: %v", what, name, err)
			}
		}
		on, ctx := n.On(db.Pool), t.Context()
		_, err := on.Exec(ctx, "create schema commitbox")
		check("Exec", err)
		_, err = on.Exec(ctx, "create table commitbox.a as select $1::text as v", pgx.QueryExecModeExec, name)
		check("Exec with an argument", err)
		rows, err := on.Query(ctx, "select v from commitbox.a where v <> $1", "")
		check("Query", err)
		got, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[string])
		check("Query", err)
		var again string
		check("QueryRow", on.QueryRow(ctx, "select v from commitbox.a where v = $1", name).Scan(&again))
		if got != name || again != name {
			t.Errorf("schema %s holds %q and %q", name, got, again)
		}
	}
}

// Goroutines that ask for one statement at once get the same text.
func TestRewriteConcurrently(t *testing.T) {
	t.Parallel()
	n := parse(t, "order")
	got := make(chan string)
	for range 8 {
		go func() { got <- n.Rewrite("select 1 from commitbox.concurrent") }()
	}
	for range 8 {
		if text := <-got; text != `select 1 from "order".concurrent` {
			t.Error(text)
		}
	}
}
