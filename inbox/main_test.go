package inbox_test

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

var quiet = slog.New(slog.DiscardHandler)

// world is a database with a table that handlers write their effects to. The table has no unique key, so that a double
// effect shows.
type world struct {
	*testenv.DB
	t *testing.T
}

func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	return newWorldIn(t)
}

func newWorldIn(t *testing.T) *world {
	t.Helper()
	w := &world{testenv.Database(t), t}
	w.exec(`create table effect (id text, note text); create index on effect (id)`)
	return w
}

func (w *world) box(cfg inbox.Config) *inbox.Box {
	w.t.Helper()
	cfg.Logger = quiet
	if cfg.BackoffBase == 0 { // what is not due stays so, however slow the machine is; makeDue moves it
		cfg.BackoffBase, cfg.BackoffMax = time.Hour, time.Hour
	}
	box, err := inbox.New(w.Pool, cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return box
}

func (w *world) exec(sql string, args ...any) {
	w.t.Helper()
	if _, err := w.Pool.Exec(context.Background(), sql, args...); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) begin(options ...pgx.TxOptions) pgx.Tx {
	w.t.Helper()
	tx, err := w.Pool.BeginTx(context.Background(), append(options, pgx.TxOptions{})[0])
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func (w *world) commit(tx pgx.Tx) {
	w.t.Helper()
	if err := tx.Commit(context.Background()); err != nil {
		w.t.Fatalf("commit: %v", err)
	}
}

func one[T any](w *world, sql string, args ...any) T {
	w.t.Helper()
	rows, err := w.Pool.Query(context.Background(), sql, args...)
	if err != nil {
		w.t.Fatal(err)
	}
	value, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[T])
	if err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
	return value
}

// within waits until done, for so long at most.
func (w *world) within(limit time.Duration, what string, done func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(limit); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatalf("not within %s: %s", limit, what)
		}
	}
}

// wantEffects asserts the number of committed effects of an id.
func (w *world) wantEffects(id inbox.ID, want int) {
	w.t.Helper()
	if got := one[int](w, `select count(*)::int from effect where id = $1`, id.String()); got != want {
		w.t.Errorf("%s has %d effects, want %d", id, got, want)
	}
}

// wantRow asserts status and attempts of the row of an id; an empty status means no row.
func (w *world) wantRow(id inbox.ID, status string, attempts int) {
	w.t.Helper()
	got := one[string](w, `select coalesce((select status || ' ' || attempts from commitbox.inbox where consumer = $1 and message_id = $2), '')`, id.Consumer, id.Message)
	want := ""
	if status != "" {
		want = status + " " + string(rune('0'+attempts))
	}
	if got != want {
		w.t.Errorf("the row of %s is %q, want %q", id, got, want)
	}
}

// makeDue moves the next attempt of an id into the past.
func (w *world) makeDue(id inbox.ID) {
	w.t.Helper()
	w.exec(`update commitbox.inbox set next_attempt_at = now() - interval '1 second' where consumer = $1 and message_id = $2 and status = 'failed'`, id.Consumer, id.Message)
}

func write(ctx context.Context, tx pgx.Tx, id inbox.ID, note string) error {
	_, err := tx.Exec(ctx, `insert into effect values ($1, $2)`, id.String(), note)
	return err
}

// effect is a handler for Process that writes one effect.
func effect(id inbox.ID) func(context.Context, pgx.Tx) (inbox.Void, error) {
	return func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, write(ctx, tx, id, "done")
	}
}

const patience = 30 * time.Second // an upper bound for what should happen at once
