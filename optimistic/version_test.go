package optimistic_test

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/migrate"
	"github.com/commitbox/commitbox/optimistic"
)

// advance raises the version of a resource in a transaction of its own.
func (w *world) advance(id string, expected int64) (version int64, err error) {
	err = pgx.BeginFunc(context.Background(), w.Pool, func(tx pgx.Tx) error {
		version, err = optimistic.Advance(context.Background(), tx, "document", id, expected)
		return err
	})
	return version, err
}

// wantVersion asserts the committed version of a resource.
func (w *world) wantVersion(id string, want int64) {
	w.t.Helper()
	got, err := optimistic.Current(context.Background(), w.begin(), "document", id)
	if err != nil || got != want {
		w.t.Errorf("%s is at version %d, %v, want %d", id, got, err, want)
	}
}

func TestA6_AdvanceRaisesTheVersion(t *testing.T) {
	w := newWorld(t)
	for expected := range int64(3) {
		w.wantVersion("d", expected)
		if got, err := w.advance("d", expected); err != nil || got != expected+1 {
			t.Errorf("got %d, %v, want %d", got, err, expected+1)
		}
	}
	w.wantVersion("d", 3)
	w.wantVersion("other", 0)
}

func TestA6_AdvanceTellsConflictFromNotFound(t *testing.T) {
	w := newWorld(t)
	for expected := range int64(3) {
		if _, err := w.advance("d", expected); err != nil {
			t.Fatal(err)
		}
	}
	for _, c := range []struct {
		id               string
		expected, actual int64
		reason           error
	}{
		{"d", 0, 3, optimistic.ErrConflict},
		{"d", 2, 3, optimistic.ErrConflict},
		{"d", 4, 3, optimistic.ErrConflict},
		{"missing", 1, 0, optimistic.ErrNotFound},
	} {
		for _, tx := range []pgx.Tx{w.begin(), w.beginSQL()} {
			_, err := optimistic.Advance(t.Context(), tx, "document", c.id, c.expected)
			wantError(t, err, c.reason, c.expected, c.actual, false)
			w.wantUsable(tx)
		}
	}
	w.exec(`delete from commitbox.resource_version`)
	_, err := w.advance("d", 3)
	wantError(t, err, optimistic.ErrNotFound, 3, 0, false)
}

// Another transaction is changing the resource and stays open: the second one hears so at once, may go on, and is right
// when it asks again after the first one has been rolled back.
func TestA6_AdvanceWaitsForNobody(t *testing.T) {
	w := newWorld(t)
	for name, expected := range map[string]int64{"create": 0, "raise": 1} {
		for end, commit := range map[string]bool{"commit": true, "rollback": false} {
			t.Run(name+" "+end, func(t *testing.T) {
				w := w.reset(t)
				if expected > 0 {
					if _, err := w.advance("d", 0); err != nil {
						t.Fatal(err)
					}
				}
				ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
				defer cancel()
				first, second := w.begin(), w.begin()
				if got, err := optimistic.Advance(ctx, first, "document", "d", expected); err != nil || got != expected+1 {
					t.Fatalf("%d, %v", got, err)
				}
				_, err := optimistic.Advance(ctx, second, "document", "d", expected)
				wantError(t, err, optimistic.ErrConflict, expected, expected, true)
				if commit {
					w.commit(first)
					_, err = optimistic.Advance(ctx, second, "document", "d", expected)
					wantError(t, err, optimistic.ErrConflict, expected, expected+1, false)
				} else {
					_ = first.Rollback(ctx)
					if got, err := optimistic.Advance(ctx, second, "document", "d", expected); err != nil || got != expected+1 {
						t.Errorf("%d, %v", got, err)
					}
				}
				w.wantUsable(second)
				w.wantVersion("d", expected+1)
			})
		}
	}
}

func TestA6_OfManyCreatorsOneWins(t *testing.T) {
	w := newWorld(t)
	for _, id := range []string{"d1", "d2", "d3", "d4", "d5"} {
		won := make(chan error, writers)
		var group sync.WaitGroup
		for range writers {
			group.Go(func() {
				got, err := w.advance(id, 0)
				if err == nil && got != 1 || err != nil && !errors.Is(err, optimistic.ErrConflict) {
					t.Errorf("%s: %d, %v", id, got, err)
				}
				won <- err
			})
		}
		group.Wait()
		close(won)
		winners := 0
		for err := range won {
			if err == nil {
				winners++
			}
		}
		if winners != 1 {
			t.Errorf("%s: %d of %d have won", id, winners, writers)
		}
		w.wantVersion(id, 1)
	}
}

func TestA6_AdvanceLosesNoUpdate(t *testing.T) {
	w := newWorld(t)
	var group sync.WaitGroup
	for range writers {
		group.Go(func() {
			cfg := optimistic.RetryConfig{MaxAttempts: 1000, BackoffMax: 100 * time.Millisecond}
			_, err := optimistic.Retry(t.Context(), w.Pool, cfg, func(ctx context.Context, tx pgx.Tx) (int64, error) {
				version, err := optimistic.Current(ctx, tx, "document", "d")
				if err != nil {
					return 0, err
				}
				var balance int64
				if err := tx.QueryRow(ctx, `select balance from account where id = 'a'`).Scan(&balance); err != nil {
					return 0, err
				}
				if _, err := optimistic.Advance(ctx, tx, "document", "d", version); err != nil {
					return 0, err
				}
				_, err = tx.Exec(ctx, `update account set balance = $1 where id = 'a'`, balance+1)
				return balance, err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	w.wantVersion("d", writers)
	if got := one[int64](w, `select balance from account where id = 'a'`); got != writers {
		t.Errorf("the balance is %d, want %d", got, writers)
	}
}

// Two transactions that advance two resources in turn would deadlock if Advance waited.
func TestA6_AdvanceDoesNotDeadlock(t *testing.T) {
	w := newWorld(t)
	for _, expected := range []int64{0, 1} {
		first, second := w.begin(), w.begin()
		for _, step := range []struct {
			tx   pgx.Tx
			id   string
			free bool
		}{{first, "d1", true}, {second, "d2", true}, {first, "d2", false}, {second, "d1", false}} {
			_, err := optimistic.Advance(t.Context(), step.tx, "document", step.id, expected)
			if step.free && err != nil {
				t.Error(err)
			} else if !step.free {
				wantError(t, err, optimistic.ErrConflict, expected, expected, true)
			}
		}
		w.commit(first)
		w.commit(second)
	}
}

func TestA6_AdvanceGoesWithItsSavepoint(t *testing.T) {
	w := newWorld(t)
	tx := w.begin()
	for _, keep := range []bool{false, true} {
		err := pgx.BeginFunc(t.Context(), tx, func(tx pgx.Tx) error {
			if _, err := optimistic.Advance(t.Context(), tx, "document", "d", 0); err != nil {
				t.Error(err)
			}
			if got, err := optimistic.Advance(t.Context(), tx, "document", "d", 1); err != nil || got != 2 {
				t.Errorf("twice in one transaction: %d, %v", got, err)
			}
			if !keep {
				return errors.New("roll back")
			}
			return nil
		})
		if keep != (err == nil) {
			t.Error(err)
		}
	}
	w.commit(tx)
	w.wantVersion("d", 2)
}

func TestA6_AStrictTransactionCannotAdvanceWhatHasChanged(t *testing.T) {
	w := newWorld(t)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			w := w.reset(t)
			for expected := range int64(2) {
				tx := w.begin(level)
				if _, err := optimistic.Current(t.Context(), tx, "document", "d"); err != nil {
					t.Fatal(err)
				}
				if _, err := w.advance("d", expected); err != nil {
					t.Fatal(err)
				}
				if _, err := optimistic.Advance(t.Context(), tx, "document", "d", expected); sqlState(err) != "40001" || !optimistic.Retryable(err) {
					t.Errorf("at version %d: got %v, want a retryable serialization failure", expected, err)
				}
			}
		})
	}
}

func TestB60_VersionsInAnotherSchema(t *testing.T) {
	w := newWorld(t)
	if err := migrate.Up(t.Context(), w.Pool, migrate.Config{Schema: "order"}); err != nil {
		t.Fatal(err)
	}
	versions, err := optimistic.New("order")
	if err != nil {
		t.Fatal(err)
	}
	tx := w.begin()
	for expected := range int64(2) {
		if got, err := versions.Advance(t.Context(), tx, "document", "d", expected); err != nil || got != expected+1 {
			t.Errorf("%d, %v", got, err)
		}
	}
	if got, err := versions.Current(t.Context(), tx, "document", "d"); err != nil || got != 2 {
		t.Errorf("%d, %v", got, err)
	}
	w.commit(tx)
	w.wantVersion("d", 0)
	var input *commitbox.InputError
	if _, err := optimistic.New("no-name"); !errors.As(err, &input) {
		t.Errorf("got %v for a name that cannot be one", err)
	}
}

func TestP14_AdvanceRefusesBadInputBeforeItIsSent(t *testing.T) {
	w := newWorld(t)
	for _, c := range []struct {
		field, typ, id string
		expected       int64
	}{
		{"typ", "", "d", 0},
		{"typ", strings.Repeat("t", 201), "d", 0},
		{"id", "t", "", 0},
		{"id", "t", strings.Repeat("d", 513), 0},
		{"id", "t", "a\x00b", 0},
		{"id", "t", "\xff", 1},
		{"expected", "t", "d", -1},
	} {
		tx := w.begin()
		var input *commitbox.InputError
		if _, err := optimistic.Advance(t.Context(), tx, c.typ, c.id, c.expected); !errors.As(err, &input) || input.Field != c.field {
			t.Errorf("got %v, want a refusal of %s", err, c.field)
		}
		if _, err := optimistic.Current(t.Context(), tx, c.typ, c.id); (c.field == "expected") != (err == nil) {
			t.Errorf("Current answers %v", err)
		}
		w.wantUsable(tx)
	}
	longest := strings.Repeat("t", 200)
	if got, err := optimistic.Advance(t.Context(), w.begin(), longest, longest+longest+longest[:112], 0); err != nil || got != 1 {
		t.Errorf("the longest names: %d, %v", got, err)
	}
}
