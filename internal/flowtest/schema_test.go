package flowtest_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
	"github.com/commitbox/commitbox/outbox"
)

// names are schema names; those that are accepted have to work, the others have to be refused before anything is sent.
var names = map[string]bool{
	"user": true, "select": true, "order": true, "at": true, "excluded": true, "_": true, strings.Repeat("a", 48): true,
	"my-schema": false, "MySchema": false, "1abc": false, "schéma": false, "a.b": false, "o'brien": false, `a"b`: false, "a$$b": false,
	"pg_x": false, strings.Repeat("a", 49): false, strings.Repeat("a", 70): false,
}

func TestB60_EverySchemaNameWorksOrIsRefused(t *testing.T) {
	t.Parallel()
	for name, accepted := range names {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := emptyWithBusiness(t)
			if accepted {
				checkWorks(t, db, name)
			} else {
				checkRefused(t, db.Pool, name)
			}
		})
	}
}

// checkWorks runs everything with a search path that leads nowhere.
func checkWorks(t *testing.T, db *testenv.DB, name string) {
	t.Helper()
	for _, sql := range []string{"create schema nothing", "alter database " + db.Name + " set search_path = nothing"} {
		if _, err := db.Pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	db.Pool.Reset()
	pool, cfg := connect(t, db.URL, pgx.QueryExecModeCacheStatement), migrate.Config{Schema: name}
	for range 2 {
		if err := migrate.Up(t.Context(), pool, cfg); err != nil {
			t.Fatal(err)
		}
	}
	i := install(t, pool, name)
	i.checkFlow(t, db)
	i.checkDeferral(t)
	i.checkOperator(t)
	for _, again := range []bool{false, true} {
		if err := migrate.Up(t.Context(), pool, cfg); err != nil {
			t.Fatal(err)
		}
		for !again && applied(t, pool, cfg) > 0 {
			if err := migrate.Down(t.Context(), pool, cfg); err != nil {
				t.Fatal(err)
			}
		}
	}
	i.enqueue(t, messages)
}

func applied(t *testing.T, pool *pgxpool.Pool, cfg migrate.Config) (n int) {
	t.Helper()
	list, err := migrate.Status(t.Context(), pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range list {
		if !m.AppliedAt.IsZero() {
			n++
		}
	}
	return n
}

// ask returns one value from a statement that names the default schema.
func ask[T any](t *testing.T, i *installation, sql string, args ...any) (value T) {
	t.Helper()
	quoted := pgx.Identifier{i.schema}.Sanitize()
	sql = strings.ReplaceAll(sql, "commitbox.", quoted+".")
	if err := i.pool.QueryRow(t.Context(), sql, args...).Scan(&value); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

// checkDeferral lets a message of a key fail: the one behind it waits, and both are published when it works again.
func (i *installation) checkDeferral(t *testing.T) {
	t.Helper()
	k := &keeper{fail: errors.New("broken")}
	sent := i.enqueue(t, messages[:2])
	const deferred = "select count(*) from commitbox.outbox_deferred"
	i.relayUntil(t, k, "both messages to be deferred", func() bool { return ask[int](t, i, deferred) == 2 })
	ask[string](t, i, "with now_due as (update commitbox.outbox_blocked set due_at = clock_timestamp() returning 1) select count(*)::text from now_due")
	k.fail = nil
	i.relayUntil(t, k, "both messages", func() bool { return len(k.messages()) == 2 })
	for j, m := range k.messages() {
		if m.ID != sent[j].ID {
			t.Errorf("message %d is %s, want %s", j, m.ID, sent[j].ID)
		}
	}
}

// checkOperator lets messages die in both boxes and requeues them.
func (i *installation) checkOperator(t *testing.T) {
	t.Helper()
	k := &keeper{fail: outbox.Permanent(errors.New("never"))}
	sent := i.enqueue(t, messages[3:])
	i.relayUntil(t, k, "a dead message", func() bool { return ask[int](t, i, "select count(*) from commitbox.outbox_dead") == 1 })
	if !ask[bool](t, i, "select commitbox.outbox_requeue('default', $1, 'again')", sent[0].ID) {
		t.Error("the dead message was not requeued")
	}
	k.fail = nil
	i.relayUntil(t, k, "the requeued message", func() bool { return len(k.messages()) == 1 })

	msg := inbox.Message{ID: inbox.ID{Consumer: "operator", Message: "m"}, Payload: []byte("p")}
	_, err := inbox.Process(t.Context(), i.inbox, msg, func(context.Context, pgx.Tx) (int, error) {
		return 0, inbox.Permanent(errors.New("never"))
	})
	if !errors.Is(err, inbox.ErrDead) {
		t.Errorf("Process: %v", err)
	}
	if got := ask[string](t, i, "select commitbox.inbox_requeue('operator', 'm', 'again')"); got != "runnable" {
		t.Errorf("inbox_requeue: %q", got)
	}
	if n := ask[int](t, i, "select count(*) from commitbox.audit"); n != 2 {
		t.Errorf("%d audit rows, want 2", n)
	}
}

func checkRefused(t *testing.T, pool *pgxpool.Pool, name string) {
	t.Helper()
	_, outboxErr := outbox.New(outbox.Config{Schema: name})
	_, relayErr := outbox.NewRelay(pool, outbox.PublishFunc(new(keeper).publish), outbox.RelayConfig{Schema: name})
	_, inboxErr := inbox.New(pool, inbox.Config{Schema: name})
	for what, err := range map[string]error{
		"outbox.New": outboxErr, "outbox.NewRelay": relayErr, "inbox.New": inboxErr,
		"migrate.Up": migrate.Up(t.Context(), pool, migrate.Config{Schema: name}),
	} {
		if err == nil || !strings.Contains(err.Error(), "schema name must match") {
			t.Errorf("%s with schema %q: %v", what, name, err)
		}
	}
}
