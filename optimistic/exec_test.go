package optimistic_test

import (
	"context"
	"database/sql"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/optimistic"
	"github.com/commitbox/commitbox/sqltx"
)

// writers is how many change one row at the same time.
const writers = 50

func TestB89_FiftyWritersLoseNoUpdate(t *testing.T) {
	w := newWorld(t)
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead} {
		w.exec(`update account set balance = 0, version = 0 where id = 'a'`)
		var group sync.WaitGroup
		for range writers {
			group.Go(func() {
				cfg := optimistic.RetryConfig{MaxAttempts: 1000, BackoffMax: 100 * time.Millisecond, IsoLevel: level}
				_, err := optimistic.Retry(t.Context(), w.Pool, cfg, func(ctx context.Context, tx pgx.Tx) (int64, error) {
					var balance, version int64
					if err := tx.QueryRow(ctx, `select balance, version from account where id = 'a'`).Scan(&balance, &version); err != nil {
						return 0, err
					}
					return optimistic.Exec(ctx, tx, account("a"), version,
						`update account set balance = $3, version = version + 1 where id = $1 and version = $2 returning version`, balance+1)
				})
				if err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		if got := one[[]int64](w, `select array[balance, version] from account where id = 'a'`); got[0] != writers || got[1] != writers {
			t.Errorf("%s: balance and version are %v, want %d", level, got, writers)
		}
	}
}

func TestB89_ExecReturnsTheNewVersion(t *testing.T) {
	w := newWorld(t)
	for _, tx := range []pgx.Tx{w.begin(), w.beginSQL()} {
		before := one[int64](w, `select version from account where id = 'a'`)
		if got, err := optimistic.Exec(t.Context(), tx, account("a"), before, rename, "Eve"); err != nil || got != before+1 {
			t.Errorf("got %d, %v, want %d", got, err, before+1)
		}
		w.commit(tx)
		w.wantAccount("a", "Eve", before+1)
	}
	w.wantAccount("b", "Bob", 7)
}

func TestB89_AConflictLeavesTheTransactionUsable(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		id             string
		expected       int64
		reason         error
		actual         int64
		statement, arg string
	}{
		"older":     {"a", 6, optimistic.ErrConflict, 7, rename, "Eve"},
		"newer":     {"a", 8, optimistic.ErrConflict, 7, rename, "Eve"},
		"missing":   {"z", 7, optimistic.ErrNotFound, 0, rename, "Eve"},
		"condition": {"a", 7, optimistic.ErrCondition, 7, strings.Replace(rename, "returning", "and owner <> $3 returning", 1), "Ada"},
	} {
		t.Run(name, func(t *testing.T) {
			for _, tx := range []pgx.Tx{w.begin(), w.beginSQL()} {
				_, err := optimistic.Exec(t.Context(), tx, account(c.id), c.expected, c.statement, c.arg)
				wantError(t, err, c.reason, c.expected, c.actual, false)
				if !strings.Contains(err.Error(), c.id+": version ") {
					t.Errorf("the error does not name the row: %v", err)
				}
				w.wantUsable(tx)
			}
			w.wantAccount("a", "Ada", 7)
		})
	}
}

// A change or a delete that is committed while Exec waits for the row.
func TestB89_WhatHappensWhileItWaits(t *testing.T) {
	w := newWorld(t)
	for name, c := range map[string]struct {
		meanwhile string
		reason    error
		actual    int64
	}{
		"changed": {`update account set version = version + 1 where id = 'a'`, optimistic.ErrConflict, 8},
		"deleted": {`delete from account where id = 'a'`, optimistic.ErrNotFound, 0},
	} {
		t.Run(name, func(t *testing.T) {
			w := w.reset(t)
			other, tx := w.begin(), w.begin()
			if _, err := other.Exec(t.Context(), c.meanwhile); err != nil {
				t.Fatal(err)
			}
			answer := make(chan error)
			go func() {
				_, err := optimistic.Exec(t.Context(), tx, account("a"), 7, rename, "Eve")
				answer <- err
			}()
			w.waitForLockWait()
			w.commit(other)
			wantError(t, <-answer, c.reason, 7, c.actual, false)
			w.wantUsable(tx)
		})
	}
}

// waitForLockWait comes back when a statement waits for a lock.
func (w *world) waitForLockWait() {
	w.t.Helper()
	const waiting = `select exists (select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock')`
	for deadline := time.Now().Add(30 * time.Second); !one[bool](w, waiting); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			w.t.Fatal("nothing waits for a lock")
		}
	}
}

func TestB89_AStrictTransactionIsRetryable(t *testing.T) {
	w := newWorld(t)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			w := w.reset(t)
			tx := w.begin(level)
			if _, err := tx.Exec(t.Context(), `select from account`); err != nil { // takes the snapshot
				t.Fatal(err)
			}
			w.exec(`update account set version = 8 where id = 'a'`)
			_, err := optimistic.Exec(t.Context(), tx, account("a"), 7, rename, "Eve")
			if sqlState(err) != "40001" || !optimistic.Retryable(err) {
				t.Errorf("got %v, want a retryable serialization failure", err)
			}
			w.wantAccount("a", "Ada", 8)
		})
	}
}

func TestB89_AnUnsafeStatementCannotBeCommitted(t *testing.T) {
	w := newWorld(t)
	for name, statement := range map[string]string{
		"version not compared":  `update account set owner = $3, version = version + 1 where id = $1 and $2::bigint is not null returning version`,
		"two rows":              `update account set owner = $3, version = version + 1 where $1::text is not null and version = $2 returning version`,
		"version not raised":    `update account set owner = $3 where id = $1 and version = $2 returning version`,
		"raised by two":         `update account set owner = $3, version = version + 2 where id = $1 and version = $2 returning version`,
		"the expected returned": `update account set owner = $3, version = version + 1 where id = $1 and version = $2 returning version - 1`,
		"nothing returned":      `update account set owner = $3, version = version + 1 where id = $1 and version = $2`,
		"too much returned":     `update account set owner = $3, version = version + 1 where id = $1 and version = $2 returning version, owner`,
		"no number returned":    `update account set owner = $3, version = version + 1 where id = $1 and version = $2 returning owner`,
		"null returned":         `update account set owner = $3, version = version + 1 where id = $1 and version = $2 returning null::bigint`,
	} {
		t.Run(name, func(t *testing.T) {
			if name == "version not compared" {
				w.exec(`update account set version = 8`)
				defer w.exec(`update account set version = 7`)
			}
			for _, tx := range []pgx.Tx{w.begin(), w.beginSQL()} {
				if _, err := optimistic.Exec(t.Context(), tx, account("a"), 7, statement, "Eve"); !errors.Is(err, optimistic.ErrUnsafe) || optimistic.Retryable(err) {
					t.Errorf("got %v, want ErrUnsafe", err)
				}
				w.wantSpoilt(tx)
			}
			if got := one[string](w, `select string_agg(owner, ' ' order by id) from account`); got != "Ada Bob" {
				t.Errorf("the owners are %s", got)
			}
		})
	}
}

// A driver that takes no further statement, as some do while rows are open, so that none can make the transaction unusable.
func TestB89_AnUnsafeStatementCannotBeCommittedWhereNoneCanFollow(t *testing.T) {
	w := newWorld(t)
	inner, err := w.sql.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	tx := sqltx.From(&busyTx{inner})
	twoRows := `update account set owner = $3, version = version + 1 where $1::text is not null and version = $2 returning version`
	if _, err := optimistic.Exec(t.Context(), tx, account("a"), 7, twoRows, "Eve"); !errors.Is(err, optimistic.ErrUnsafe) {
		t.Errorf("got %v, want ErrUnsafe", err)
	}
	if err := tx.Commit(t.Context()); err == nil {
		t.Error("it can be committed")
	}
	w.wantAccount("a", "Ada", 7)
}

type busyTx struct{ *sql.Tx }

func (b *busyTx) ExecContext(context.Context, string, ...any) (sql.Result, error) {
	return nil, errors.New("busy")
}

// A statement that has no place for the version is refused by PostgreSQL or by pgx.
func TestB89_AStatementWithoutTheVersionFails(t *testing.T) {
	w := newWorld(t)
	for _, statement := range []string{
		`update account set owner = $3, version = version + 1 where id = $1 returning version`,
		`update account set version = version + 1 where id = $1 returning version`,
	} {
		tx := w.begin()
		_, err := optimistic.Exec(t.Context(), tx, account("a"), 7, statement, "Eve")
		if err == nil || optimistic.Retryable(err) {
			t.Errorf("got %v for %s", err, statement)
		}
		_ = tx.Rollback(t.Context())
	}
	w.wantAccount("a", "Ada", 7)
}

func TestB89_ADeleteCanBeConditional(t *testing.T) {
	w := newWorld(t)
	const remove = `delete from account where id = $1 and version = $2 returning version + 1`
	for _, c := range []struct {
		expected int64
		want     error
	}{{6, optimistic.ErrConflict}, {7, nil}, {7, optimistic.ErrNotFound}} {
		tx := w.begin()
		if _, err := optimistic.Exec(t.Context(), tx, account("a"), c.expected, remove); !errors.Is(err, c.want) {
			t.Errorf("delete at %d: %v, want %v", c.expected, err, c.want)
		}
		w.commit(tx)
	}
}

// A key of two values moves the version to $3.
func TestB89_AKeyMayHaveSeveralValues(t *testing.T) {
	w := newWorld(t)
	row := optimistic.Row{Look: `select version from account where id = $1 and owner = $2`, Key: []any{"a", "Ada"}}
	const deposit = `update account set balance = balance + $4, version = version + 1 where id = $1 and owner = $2 and version = $3 returning version`
	tx := w.begin()
	if got, err := optimistic.Exec(t.Context(), tx, row, 7, deposit, 5); err != nil || got != 8 {
		t.Errorf("got %d, %v", got, err)
	}
	_, err := optimistic.Exec(t.Context(), tx, row, 7, deposit, 5)
	wantError(t, err, optimistic.ErrConflict, 7, 8, false)
	w.commit(tx)
}

func TestP14_ExecRefusesBadInputBeforeItIsSent(t *testing.T) {
	w := newWorld(t)
	ok := account("a")
	for field, call := range map[string]func(tx pgx.Tx) error{
		"Row.Look": execWith(optimistic.Row{Key: ok.Key}, 7, rename, "x"),
		"Row.Key":  execWith(optimistic.Row{Look: ok.Look}, 7, rename, "x"),
		"sql":      execWith(ok, 7, "", "x"),
		"expected": execWith(ok, -1, rename, "x"),
		"args":     execWith(ok, 7, rename, pgx.NamedArgs{"owner": "x"}),
		"tx":       func(pgx.Tx) error { return execWith(ok, 7, rename, "x")(nil) },
	} {
		tx := w.begin()
		var input *commitbox.InputError
		if err := call(tx); !errors.As(err, &input) || input.Field != field {
			t.Errorf("got %v, want a refusal of %s", err, field)
		}
		w.wantUsable(tx)
	}
	if err := execWith(ok, math.MaxInt64, rename, "x")(w.begin()); err == nil {
		t.Error("the largest number has no successor, yet it is accepted")
	}
	tx := w.begin()
	w.commit(tx)
	var input *commitbox.InputError
	if err := execWith(ok, 7, rename, "x")(tx); !errors.As(err, &input) || input.Field != "tx" {
		t.Errorf("got %v for a transaction that has ended", err)
	}
}

func execWith(row optimistic.Row, expected int64, sql string, args ...any) func(pgx.Tx) error {
	return func(tx pgx.Tx) error {
		_, err := optimistic.Exec(context.Background(), tx, row, expected, sql, args...)
		return err
	}
}

// Whatever cannot be looked up is an error, and no conflict.
func TestB89_ALookThatFailsIsNoConflict(t *testing.T) {
	w := newWorld(t)
	for _, look := range []string{`select version from account where $1 <> ''`, `select owner from account where id = $1`, `select 1 / 0 where $1 = 'a'`} {
		tx := w.begin()
		_, err := optimistic.Exec(t.Context(), tx, optimistic.Row{Look: look, Key: []any{"a"}}, 6, rename, "Eve")
		var e *optimistic.Error
		if err == nil || errors.As(err, &e) || optimistic.Retryable(err) {
			t.Errorf("%s: got %v", look, err)
		}
		_ = tx.Rollback(t.Context())
	}
}
