package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
)

const longSleep = `select pg_sleep(60)`

// A context of the handler's own that ends in the middle of a statement closes the connection, which says nothing about
// the store.
func TestF17_AConnectionClosedByTheHandlerCounts(t *testing.T) {
	w := newWorld(t)
	declined := errors.New("declined")
	for name, handler := range map[string]func(ctx context.Context, tx pgx.Tx) error{
		"a sibling cancels, as errgroup does": func(ctx context.Context, tx pgx.Tx) error {
			ctx, cancel := context.WithCancelCause(ctx)
			time.AfterFunc(50*time.Millisecond, func() { cancel(declined) })
			_, err := tx.Exec(ctx, longSleep)
			if err == nil {
				t.Error("the statement was not cancelled")
			}
			return context.Cause(ctx)
		},
		"a deadline hidden by its text": func(ctx context.Context, tx pgx.Tx) error {
			ctx, cancel := context.WithTimeout(ctx, 50*time.Millisecond)
			defer cancel()
			_, err := tx.Exec(ctx, longSleep)
			return errors.New("charge: " + err.Error())
		},
		"a context that had ended before": func(ctx context.Context, tx pgx.Tx) error {
			ctx, cancel := context.WithCancel(ctx)
			cancel()
			return write(ctx, tx, anID, "")
		},
	} {
		id := inbox.ID{Consumer: "c", Message: name}
		_, err := inbox.Process(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			return inbox.Void{}, handler(ctx, tx)
		})
		if !errors.Is(err, inbox.ErrFailed) {
			t.Errorf("%s: %v", name, err)
		}
		w.wantRow(id, "failed", 1)
	}
}

func TestF17_TheDeadlineOfTheCallerCounts(t *testing.T) {
	w := newWorld(t)
	for name, told := range map[string]func(error) error{
		"wrapped":    func(err error) error { return fmt.Errorf("charge: %w", err) },
		"hidden":     func(err error) error { return errors.New("charge: " + err.Error()) },
		"swallowed":  func(error) error { return nil },
		"by another": func(error) error { return errors.New("declined") },
	} {
		id := inbox.ID{Consumer: "c", Message: name}
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		_, err := inbox.Process(ctx, w.box(inbox.Config{}), inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			_, err := tx.Exec(ctx, longSleep)
			return inbox.Void{}, told(err)
		})
		cancel()
		if !errors.Is(err, inbox.ErrFailed) {
			t.Errorf("%s: %v", name, err)
		}
		w.wantRow(id, "failed", 1)
	}
}

// The server ends the session of a handler that is idle for too long: the message is what took the time.
func TestF17_IdleInTransactionCounts(t *testing.T) {
	w := newWorld(t)
	cfg, err := pgxpool.ParseConfig(w.URL)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = "100"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	box, err := inbox.New(pool, inbox.Config{Logger: quiet, BackoffBase: time.Hour, BackoffMax: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	_, err = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		pid := tx.Conn().PgConn().PID()
		w.within(patience, "the server ends the session", func() bool {
			return one[int](w, `select count(*)::int from pg_stat_activity where pid = $1`, pid) == 0
		})
		return inbox.Void{}, write(ctx, tx, anID, "")
	})
	if !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("got %v", err)
	}
	w.wantRow(anID, "failed", 1)
}

func TestF17_ALostConnectionCostsNoAttempt(t *testing.T) {
	w, box, proxy := proxied(t, inbox.Config{})
	for _, name := range []string{"with a pooled connection", "with a new one"} {
		id := inbox.ID{Consumer: "c", Message: name} // of its own: the server may still hold the lock of the one before
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			proxy.Cut()
			return inbox.Void{}, write(ctx, tx, id, "")
		})
		if !errors.Is(err, inbox.ErrUnavailable) {
			t.Errorf("%s: %v", name, err)
		}
		w.wantRow(id, "", 0)
	}
}

func TestHandleCancelledInAStatementCostsNoAttempt(t *testing.T) {
	w := newWorld(t)
	tx := w.begin()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(200*time.Millisecond, cancel)
	_, err := inbox.Handle(ctx, tx, anID, func(ctx context.Context) (inbox.Void, error) {
		_, err := tx.Exec(ctx, longSleep)
		return inbox.Void{}, err
	})
	if !errors.Is(err, inbox.ErrUnavailable) || !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	if err := inbox.RecordFailure(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, err); !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("RecordFailure: %v", err)
	}
	w.wantRow(anID, "", 0)
}
