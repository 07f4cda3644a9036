// Package sqltx_test uses commitbox in the transactions of other libraries: database/sql over pgx and over lib/pq, sqlx, GORM,
// bun and ent.
package sqltx_test

import (
	"context"
	"database/sql"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/sqltx"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// world is a database with a table that handlers write their effects to, and one stack on it.
type world struct {
	*testing.T
	*testenv.DB
	stack
	open begin
	id   inbox.ID
}

// forEach runs a test for each stack, all on one database.
func forEach(t *testing.T, test func(w *world)) {
	t.Helper()
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), `create table effects (id bigint generated always as identity primary key, note text not null,
		constraint no_bad_note check (note <> 'bad'));
		create table account (id text primary key, balance int not null, version bigint not null default 1)`); err != nil {
		t.Fatal(err)
	}
	for _, s := range stacks {
		t.Run(s.name, func(t *testing.T) {
			test(&world{T: t, DB: db, stack: s, open: s.connect(t, db.URL), id: inbox.ID{Consumer: "orders", Message: s.name}})
		})
	}
}

// session is a transaction of a stack.
type session struct {
	w    *world
	tx   sqltx.Tx
	view pgx.Tx
	add  func(ctx context.Context, note string) error // writes an effect by the stack's own means
}

func (w *world) begin(options *sql.TxOptions) *session {
	return w.beginIn(context.Background(), options)
}

func (w *world) beginIn(ctx context.Context, options *sql.TxOptions) *session {
	w.Helper()
	tx, add, err := w.open(ctx, options)
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(func() { _ = tx.Rollback() })
	return &session{w, tx, sqltx.From(tx), add}
}

func (s *session) commit() {
	s.w.Helper()
	if err := s.tx.Commit(); err != nil {
		s.w.Fatalf("commit: %v", err)
	}
}

// write writes the effect of the stack's message.
func (s *session) write(ctx context.Context) error { return s.add(ctx, s.w.name) }

func (w *world) box() *inbox.Box {
	w.Helper()
	box, err := inbox.New(w.Pool, inbox.Config{BackoffBase: time.Hour, BackoffMax: time.Hour, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		w.Fatal(err)
	}
	return box
}

func one[T any](w *world, statement string, args ...any) (value T) {
	w.Helper()
	if err := w.Pool.QueryRow(context.Background(), statement, args...).Scan(&value); err != nil {
		w.Fatalf("%s: %v", statement, err)
	}
	return value
}

// want compares what is committed: effects, the inbox's row ("" for none), messages.
func (w *world) want(effects int, row string, messages int) {
	w.Helper()
	if got := one[int](w, `select count(*) from effects where note = $1`, w.name); got != effects {
		w.Errorf("%d effects, want %d", got, effects)
	}
	got := one[string](w, `select coalesce(max(status || ' ' || attempts), '') from commitbox.inbox where message_id = $1`, w.id.Message)
	if got != row {
		w.Errorf("the inbox has %q, want %q", got, row)
	}
	if got := one[int](w, `select count(*) from commitbox.outbox_message where topic = $1`, w.name); got != messages {
		w.Errorf("%d messages, want %d", got, messages)
	}
}

func contains(w *world, text, part string) {
	w.Helper()
	if !strings.Contains(text, part) {
		w.Errorf("%q does not tell of %q", text, part)
	}
}
