package testenv_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
)

func sendBatch(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	batch := new(pgx.Batch)
	for i := range n {
		batch.Queue(`SELECT $1::int`, i)
	}
	if err := pool.SendBatch(t.Context(), batch).Close(); err != nil {
		t.Fatal(err)
	}
}

func execute(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func TestWireCounter(t *testing.T) {
	t.Parallel()
	pool, counter := testenv.EmptyDatabase(t).CountedPool(t)
	big := make([]byte, 1<<20)
	for _, c := range []struct {
		name string
		do   func()
		want testenv.Wire
	}{
		{"batch of three", func() { sendBatch(t, pool, 3) }, testenv.Wire{Statements: 3, RoundTrips: 1}},
		{"simple query", func() { execute(t, pool, `SELECT 1`) }, testenv.Wire{Statements: 1, RoundTrips: 1}},
		{"one by one", func() {
			for i := range 3 {
				execute(t, pool, `SELECT $1::int`, i)
			}
		}, testenv.Wire{Statements: 3, RoundTrips: 3}},
		{"message larger than a buffer", func() {
			execute(t, pool, `SELECT length($1::bytea)`, big)
		}, testenv.Wire{Statements: 1, RoundTrips: 1}},
		{"nothing", func() {}, testenv.Wire{}},
	} {
		c.do() // connects and prepares
		if got := counter.Measure(c.do); got != c.want {
			t.Errorf("%s: %+v, want %+v", c.name, got, c.want)
		}
	}
}

func TestWireCounterSeesPreparing(t *testing.T) {
	t.Parallel()
	pool, counter := testenv.EmptyDatabase(t).CountedPool(t)
	execute(t, pool, `SELECT 1`)
	got := counter.Measure(func() { execute(t, pool, `SELECT $1::text`, "x") })
	if want := (testenv.Wire{Statements: 1, RoundTrips: 2}); got != want {
		t.Errorf("the first use of a statement: %+v, want %+v", got, want)
	}
}
