package optimistic_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/optimistic"
)

// quick makes the waits of a test short.
var quick = optimistic.RetryConfig{MaxAttempts: 4, BackoffBase: time.Microsecond}

// TestRetry runs its parts on one database, one after the other.
func TestRetry(t *testing.T) {
	w := newWorld(t)
	for name, part := range map[string]func(*testing.T, *world){
		"is bounded":                          retryIsBounded,
		"ends when nothing is read again":     retryEndsWhenNothingIsReadAgain,
		"goes on while another is changing":   retryGoesOnWhileAnotherIsChanging,
		"runs again after a failed commit":    retryRunsAgainAfterAFailedCommit,
		"returns other errors at once":        retryReturnsOtherErrorsAtOnce,
		"ends with its context":               retryEndsWithItsContext,
		"knows what it did not send":          retryKnowsWhatItDidNotSend,
		"leaves nothing behind after a panic": retryLeavesNothingBehindAfterAPanic,
	} {
		t.Run(name, func(t *testing.T) {
			part(t, w.reset(t))
		})
	}
}

func retryIsBounded(t *testing.T, w *world) {
	calls := 0
	_, err := optimistic.Retry(t.Context(), w.Pool, quick, func(ctx context.Context, tx pgx.Tx) (int64, error) {
		calls++
		var version int64
		if err := tx.QueryRow(ctx, `select version from account where id = 'a'`).Scan(&version); err != nil {
			return 0, err
		}
		w.exec(`update account set version = version + 1 where id = 'a'`) // somebody else is always faster
		return optimistic.Exec(ctx, tx, account("a"), version, rename, "Eve")
	})
	if calls != quick.MaxAttempts || !errors.Is(err, optimistic.ErrConflict) {
		t.Errorf("%d calls, %v", calls, err)
	}
	w.wantAccount("a", "Ada", 11)
}

// A version that came from elsewhere stays stale, however often it is tried.
func retryEndsWhenNothingIsReadAgain(t *testing.T, w *world) {
	calls := 0
	_, err := optimistic.Retry(t.Context(), w.Pool, quick, func(ctx context.Context, tx pgx.Tx) (int64, error) {
		calls++
		return optimistic.Exec(ctx, tx, account("a"), 3, rename, "Eve")
	})
	wantError(t, err, optimistic.ErrConflict, 3, 7, false)
	if calls != 2 {
		t.Errorf("tried %d times", calls)
	}
}

// What is only being changed may be free the next time, at the same version.
func retryGoesOnWhileAnotherIsChanging(t *testing.T, w *world) {
	other := w.begin()
	if _, err := optimistic.Advance(t.Context(), other, "document", "d", 0); err != nil {
		t.Fatal(err)
	}
	calls := 0
	got, err := optimistic.Retry(t.Context(), w.Pool, quick, func(ctx context.Context, tx pgx.Tx) (int64, error) {
		if calls++; calls == 3 {
			_ = other.Rollback(ctx)
		}
		return optimistic.Advance(ctx, tx, "document", "d", 0)
	})
	if got != 1 || err != nil || calls != 3 {
		t.Errorf("version %d after %d calls, %v", got, calls, err)
	}
}

func retryRunsAgainAfterAFailedCommit(t *testing.T, w *world) {
	cfg := quick
	cfg.IsoLevel = pgx.Serializable
	calls := 0
	_, err := optimistic.Retry(t.Context(), w.Pool, cfg, func(ctx context.Context, tx pgx.Tx) (int, error) {
		calls++
		if _, err := tx.Exec(ctx, `insert into account (id) select 'n' || count(*) from account`); err != nil {
			return 0, err
		}
		if calls > 1 {
			return 0, nil
		}
		other := w.begin(pgx.Serializable) // reads and writes the same, and commits first
		if _, err := other.Exec(ctx, `insert into account (id) select 'm' || count(*) from account`); err != nil {
			return 0, err
		}
		return 0, other.Commit(ctx)
	})
	if calls != 2 || err != nil {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func retryReturnsOtherErrorsAtOnce(t *testing.T, w *world) {
	for _, want := range []error{errors.New("mine"), optimistic.ErrNotFound, optimistic.ErrCondition, optimistic.ErrUnsafe} {
		calls := 0
		_, err := optimistic.Retry(t.Context(), w.Pool, quick, func(ctx context.Context, tx pgx.Tx) (int, error) {
			calls++
			_, err := tx.Exec(ctx, `update account set owner = 'Eve'`)
			return 0, errors.Join(err, want)
		})
		if calls != 1 || !errors.Is(err, want) {
			t.Errorf("%d calls, %v", calls, err)
		}
	}
	w.wantAccount("a", "Ada", 7)
}

func retryEndsWithItsContext(t *testing.T, w *world) {
	ctx, cancel := context.WithCancel(t.Context())
	cfg := optimistic.RetryConfig{MaxAttempts: 9, BackoffBase: time.Hour}
	calls := 0
	_, err := optimistic.Retry(ctx, w.Pool, cfg, func(context.Context, pgx.Tx) (int, error) {
		calls++
		time.AfterFunc(10*time.Millisecond, cancel)
		return 0, optimistic.ErrConflict
	})
	if calls != 1 || !errors.Is(err, context.Canceled) || !errors.Is(err, optimistic.ErrConflict) {
		t.Errorf("%d calls, %v", calls, err)
	}
}

// COMMIT is not sent under a context that has ended, so nothing is unknown.
func retryKnowsWhatItDidNotSend(t *testing.T, w *world) {
	ctx, cancel := context.WithCancel(t.Context())
	_, err := optimistic.Retry(ctx, w.Pool, quick, func(ctx context.Context, tx pgx.Tx) (int64, error) {
		defer cancel()
		return optimistic.Exec(ctx, tx, account("a"), 7, rename, "Eve")
	})
	if !errors.Is(err, context.Canceled) || errors.Is(err, optimistic.ErrOutcomeUnknown) {
		t.Error(err)
	}
	w.wantAccount("a", "Ada", 7)
}

func retryLeavesNothingBehindAfterAPanic(t *testing.T, w *world) {
	func() {
		defer func() {
			if recover() == nil {
				t.Error("the panic did not reach the caller")
			}
		}()
		_, _ = optimistic.Retry(t.Context(), w.Pool, quick, func(ctx context.Context, tx pgx.Tx) (int, error) {
			_, err := tx.Exec(ctx, `update account set owner = 'Eve'`)
			panic(fmt.Sprint("no", err))
		})
	}()
	w.wantAccount("a", "Ada", 7)
	if n := w.Pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are not given back", n)
	}
}

// The answer to COMMIT is lost: that is told as what it is and not tried again. With the inbox the same command finds out.
func TestP11_ALostCommitIsUnknownAndNotTriedAgain(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		cut   func(p *testenv.Proxy, pattern string) <-chan struct{}
		owner string
	}{
		"committed":   {(*testenv.Proxy).CutAfter, "Eve"},
		"rolled back": {(*testenv.Proxy).CutBefore, "Ada"},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.reset(t)
			w.exec(`delete from commitbox.inbox`)
			proxy := testenv.NewProxy(t, w.URL)
			conn, err := pgx.Connect(t.Context(), proxy.URL(t, w.URL)+"&default_query_exec_mode=exec") // COMMIT is sent as such
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = conn.Close(context.Background()) })
			calls := 0
			change := func(ctx context.Context, tx pgx.Tx) (int64, error) {
				res, err := inbox.Handle(ctx, tx, inbox.ID{Consumer: "c", Message: "m"}, func(ctx context.Context) (int64, error) {
					calls++
					return optimistic.Exec(ctx, tx, account("a"), 7, rename, "Eve")
				})
				return res.Value, err
			}
			c.cut(proxy, "commit\x00")
			if _, err := optimistic.Retry(t.Context(), conn, quick, change); !errors.Is(err, optimistic.ErrOutcomeUnknown) || calls != 1 {
				t.Errorf("%d calls, %v", calls, err)
			}
			w.wantAccount("a", c.owner, map[string]int64{"Eve": 8, "Ada": 7}[c.owner])
			got, err := optimistic.Retry(t.Context(), w.Pool, quick, change)
			for errors.Is(err, inbox.ErrInProgress) { // the lost transaction is not rolled back yet
				got, err = optimistic.Retry(t.Context(), w.Pool, quick, change)
			}
			if err != nil || got != 8 {
				t.Errorf("the same command again: version %d, %v", got, err)
			}
			w.wantAccount("a", "Eve", 8)
		})
	}
}

func TestP14_RetryNamesEveryBadField(t *testing.T) {
	t.Parallel()
	bad := optimistic.RetryConfig{MaxAttempts: -1, BackoffBase: 2, BackoffMax: 1, IsoLevel: "snapshot"}
	_, err := optimistic.Retry[int](t.Context(), nil, bad, nil)
	for _, field := range []string{"MaxAttempts", "BackoffMax", "IsoLevel", "db", "fn"} {
		if !hasField(err, field) {
			t.Errorf("%v does not name %s", err, field)
		}
	}
	if _, err := optimistic.Retry[int](t.Context(), new(pgxpool.Pool), optimistic.RetryConfig{BackoffBase: -1}, nil); !hasField(err, "BackoffBase") {
		t.Errorf("%v does not name BackoffBase", err)
	}
	unused := func(context.Context, pgx.Tx) (int, error) { return 0, nil }
	for _, db := range []optimistic.Beginner{nil, (*pgxpool.Pool)(nil), (*pgx.Conn)(nil)} {
		if _, err := optimistic.Retry(t.Context(), db, optimistic.RetryConfig{}, unused); !hasField(err, "db") {
			t.Errorf("%T: %v does not name db", db, err)
		}
	}
}

// hasField looks through the joined errors.
func hasField(err error, field string) bool {
	//nolint:errorlint // every error of the tree is looked at by itself
	switch e := err.(type) {
	case *commitbox.InputError:
		return e.Field == field || e.Field == "RetryConfig."+field
	case interface{ Unwrap() []error }:
		for _, part := range e.Unwrap() {
			if hasField(part, field) {
				return true
			}
		}
	}
	return false
}
