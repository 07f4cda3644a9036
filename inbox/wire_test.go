package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// wired is a world whose traffic is counted, with one connection, so that its statement cache is warm after one call.
type wired struct {
	*world
	counter *testenv.WireCounter
	calls   int
}

func newWired(t *testing.T) (*wired, *inbox.Box) {
	w := &wired{world: newWorld(t)}
	w.Pool, w.counter = w.CountedPool(t)
	return w, w.box(inbox.Config{})
}

// nextID returns an id that was not used before.
func (w *wired) nextID() inbox.ID {
	w.calls++
	return inbox.ID{Consumer: "c", Message: fmt.Sprint(w.calls)}
}

// want measures a call whose statements are warm.
func (w *wired) want(name string, trips, statements int, call func() error) {
	w.t.Helper()
	for range 2 {
		if err := call(); err != nil {
			w.t.Fatalf("%s: %v", name, err)
		}
	}
	got := w.counter.Measure(func() {
		if err := call(); err != nil {
			w.t.Errorf("%s: %v", name, err)
		}
	})
	if got.RoundTrips != trips || got.Statements != statements {
		w.t.Errorf("%s: %d round trips and %d statements, want %d and %d", name, got.RoundTrips, got.Statements, trips, statements)
	}
}

func TestWireProcess(t *testing.T) {
	w, box := newWired(t)
	w.want("no inbox", 3, 3, func() error {
		return pgx.BeginFunc(t.Context(), w.Pool, func(tx pgx.Tx) error { return write(t.Context(), tx, w.nextID(), "") })
	})
	w.want("no result", 3, 4, func() error {
		id := w.nextID()
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, effect(id))
		return err
	})
	w.want("with result", 3, 5, func() error {
		id := w.nextID()
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (int, error) {
			return 1, write(ctx, tx, id, "")
		})
		return err
	})
	w.want("failure", 4, 9, func() error {
		id := w.nextID()
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (int, error) {
			return 0, errors.Join(write(ctx, tx, id, ""), errors.New("x"))
		})
		if errors.Is(err, inbox.ErrFailed) {
			err = nil
		}
		return err
	})
	w.want("duplicate", 2, 4, func() error {
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID))
		return err
	})
}

func TestWireHandle(t *testing.T) {
	w, _ := newWired(t)
	handle := func(id inbox.ID, opts ...inbox.Option) error {
		return pgx.BeginFunc(t.Context(), w.Pool, func(tx pgx.Tx) error {
			_, err := inbox.Handle(t.Context(), tx, id, func(ctx context.Context) (inbox.Void, error) {
				return inbox.Void{}, write(ctx, tx, id, "")
			}, opts...)
			return err
		})
	}
	w.want("savepoint", 3+2, 6, func() error { return handle(w.nextID()) })
	w.want("no savepoint", 3+1, 4, func() error { return handle(w.nextID(), inbox.NoSavepoint()) })
	if err := handle(anID); err != nil {
		t.Fatal(err)
	}
	w.want("duplicate", 2+2, 6, func() error { return handle(anID) })
	w.want("duplicate without savepoint", 2+2, 4, func() error { return handle(anID, inbox.NoSavepoint()) })
}

func TestWireBatch(t *testing.T) {
	w, box := newWired(t)
	batch := func() error {
		msgs := make([]inbox.Message, 50)
		for i := range msgs {
			msgs[i].ID = w.nextID()
		}
		var failed error
		for _, a := range inbox.ProcessBatch(t.Context(), box, msgs, writeAll) {
			failed = errors.Join(failed, a.Err)
		}
		return failed
	}
	w.want("50 with results", 3, 1+1+50+1+1, batch)
}

// A duplicate writes nothing: no transaction id is assigned and no WAL is written.
func TestDuplicateWritesNothing(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil {
		t.Fatal(err)
	}
	tx := w.begin()
	res, err := inbox.Handle(t.Context(), tx, anID, func(context.Context) (inbox.Void, error) { return inbox.Void{}, nil })
	if err != nil || !res.Replayed {
		t.Fatal(res, err)
	}
	var xid *string
	if err := tx.QueryRow(t.Context(), `select pg_current_xact_id_if_assigned()::text`).Scan(&xid); err != nil || xid != nil {
		t.Errorf("a duplicate was given the transaction id %v, %v", xid, err)
	}
}

// Every mode of pgx works, the ones without prepared statements too, and through a transaction pooler.
func TestExecModes(t *testing.T) {
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol", "pgbouncer"} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t)
			url, exec := w.URL, mode
			if mode == "pgbouncer" {
				url, exec = w.Bouncer(t), "exec"
			}
			cfg, err := pgxpool.ParseConfig(url)
			if err != nil {
				t.Fatal(err)
			}
			cfg.ConnConfig.DefaultQueryExecMode = map[string]pgx.QueryExecMode{
				"cache_statement": pgx.QueryExecModeCacheStatement, "cache_describe": pgx.QueryExecModeCacheDescribe,
				"describe_exec": pgx.QueryExecModeDescribeExec, "exec": pgx.QueryExecModeExec, "simple_protocol": pgx.QueryExecModeSimpleProtocol,
			}[exec]
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			w.Pool = pool
			everyCall(t, w)
		})
	}
}

// everyCall uses each statement of the package once.
func everyCall(t *testing.T, w *world) {
	box := w.box(inbox.Config{MaxAttempts: 3})
	msg := inbox.Message{ID: anID, Payload: []byte{0, 255}, Headers: map[string]string{"a": "b"}, Fingerprint: inbox.FingerprintOf([]byte("x")), TraceID: "t"}
	fail := func(context.Context, pgx.Tx) (int, error) { return 0, errors.New("x") }
	run := func(ctx context.Context, tx pgx.Tx) (int, error) { return 5, write(ctx, tx, anID, "") }
	if _, err := inbox.Process(t.Context(), box, msg, fail); !errors.Is(err, inbox.ErrFailed) {
		t.Fatal(err)
	}
	w.makeDue(anID)
	lease, err := box.Acquire(t.Context(), msg)
	if err != nil {
		t.Fatal(err)
	}
	if err := lease.Fail(t.Context(), inbox.Permanent(errors.New("x"))); !errors.Is(err, inbox.ErrDead) {
		t.Fatal(err)
	}
	if _, err := box.Requeue(t.Context(), anID, "again"); err != nil {
		t.Fatal(err)
	}
	if n, err := inbox.Resume(t.Context(), box, anID.Consumer, func(ctx context.Context, m inbox.Message) error {
		_, err := inbox.Process(ctx, box, m, run)
		return err
	}); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if res, err := inbox.Process(t.Context(), box, msg, run); err != nil || res.Value != 5 || !res.Replayed {
		t.Fatal(res, err)
	}
	w.wantEffects(anID, 1)
	for _, a := range inbox.ProcessBatch(t.Context(), box, messages(3), writeAll) {
		if a.Err != nil || a.Value == "" {
			t.Fatalf("%+v", a)
		}
	}
	leased, err := inbox.ProcessLeased(t.Context(), box, inbox.Message{ID: inbox.ID{Consumer: "l", Message: "1"}}, func(ctx context.Context, l *inbox.Lease) (int, error) {
		return inbox.Step(ctx, l, "s", func(context.Context) (int, error) { return 6, nil })
	})
	if err != nil || leased.Value != 6 {
		t.Fatal(leased, err)
	}
	tx := w.begin()
	if _, err := inbox.Handle(t.Context(), tx, inbox.ID{Consumer: "h", Message: "1"}, func(context.Context) (int, error) { return 0, errors.New("x") }); !errors.Is(err, inbox.ErrFailed) {
		t.Fatal(err)
	}
	if err := inbox.MarkCompleted(t.Context(), tx, inbox.ID{Consumer: "h", Message: "2"}, 1, ""); err != nil {
		t.Fatal(err)
	}
	w.commit(tx)
	if _, err := box.List(t.Context(), inbox.Filter{Consumer: "h", Status: inbox.StatusFailed}); err != nil {
		t.Fatal(err)
	}
	if err := box.Discard(t.Context(), inbox.ID{Consumer: "h", Message: "1"}, ""); err != nil {
		t.Fatal(err)
	}
}
