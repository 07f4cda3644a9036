package optimistic

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
)

// RetryConfig bounds [Retry]. The zero value is usable.
type RetryConfig struct {
	MaxAttempts int // how often fn runs, at most; default 10
	// BackoffBase is the longest wait after the first attempt; it doubles with each one up to BackoffMax. The wait is a
	// random part of it, so that those who met once do not meet again. Defaults 10 ms and 1 s.
	BackoffBase, BackoffMax time.Duration
	IsoLevel                pgx.TxIsoLevel // default pgx.ReadCommitted
}

func (c RetryConfig) withDefaults() RetryConfig {
	c.MaxAttempts = cmp.Or(c.MaxAttempts, 10)
	c.BackoffBase = cmp.Or(c.BackoffBase, 10*time.Millisecond)
	c.BackoffMax = cmp.Or(c.BackoffMax, max(time.Second, c.BackoffBase))
	c.IsoLevel = cmp.Or(c.IsoLevel, pgx.ReadCommitted)
	return c
}

// check names every bad field at once.
func (c RetryConfig) check() error {
	var errs []error
	refuse := func(bad bool, field, problem string) {
		if bad {
			errs = append(errs, &commitbox.InputError{Field: "RetryConfig." + field, Problem: problem})
		}
	}
	refuse(c.MaxAttempts < 1, "MaxAttempts", "is negative")
	refuse(c.BackoffBase < 0, "BackoffBase", "is negative")
	refuse(c.BackoffMax < c.BackoffBase, "BackoffMax", "is shorter than BackoffBase")
	refuse(c.IsoLevel != pgx.ReadCommitted && c.IsoLevel != pgx.RepeatableRead && c.IsoLevel != pgx.Serializable,
		"IsoLevel", "must be ReadCommitted, RepeatableRead or Serializable")
	return errors.Join(errs...)
}

// wait returns how long to wait after the n-th attempt, for a random number below 1.
func (c RetryConfig) wait(n int, random float64) time.Duration {
	longest := c.BackoffBase
	for range n - 1 {
		if longest >= c.BackoffMax/2 {
			longest = c.BackoffMax
			break
		}
		longest *= 2
	}
	return time.Duration(random * float64(longest))
}

// Beginner opens transactions: a *pgxpool.Pool, a *pgx.Conn.
type Beginner interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

// Retry runs fn in a transaction of its own and commits it. If the error of fn, or of COMMIT, is [Retryable], it rolls
// back, waits a little and runs fn again in a new transaction, which sees what has changed. So fn has to read in tx
// whatever it decides by, the version first of all; it may be called several times, and what it does outside tx is not
// undone. A conflict that shows that fn does not read (it expects the same version as before, which was gone already) is
// returned at once.
//
// The error is that of fn or of COMMIT, whatever the reason for the end; after the last attempt it still matches
// ErrConflict. If ctx ends while Retry waits, it matches ctx.Err too. A panic in fn rolls back and goes on to the caller.
//
// Not promised: what became of a COMMIT whose answer was lost. The error then matches ErrOutcomeUnknown, and fn does not run
// again. Where that matters, let fn claim the command with inbox.Handle and call Retry again: it runs once. With any other
// error nothing is committed.
func Retry[R any](ctx context.Context, db Beginner, cfg RetryConfig, fn func(ctx context.Context, tx pgx.Tx) (R, error)) (R, error) {
	var none R
	cfg = cfg.withDefaults()
	if err := errors.Join(cfg.check(), checkCall(db, fn == nil)); err != nil {
		return none, err
	}
	var before error
	for attempt := 1; ; attempt++ {
		value, err := once(ctx, db, cfg.IsoLevel, fn)
		switch {
		case err == nil:
			return value, nil
		case !Retryable(err) || sameConflict(before, err):
			return none, err
		case attempt == cfg.MaxAttempts:
			return none, fmt.Errorf("optimistic: gave up after %d attempts: %w", attempt, err)
		}
		if ended := sleep(ctx, cfg.wait(attempt, rand.Float64())); ended != nil {
			return none, errors.Join(err, ended)
		}
		before = err
	}
}

func checkCall(db Beginner, noFunc bool) error {
	var errs []error
	if v := reflect.ValueOf(db); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		errs = append(errs, &commitbox.InputError{Field: "db", Problem: "is nil"})
	}
	if noFunc {
		errs = append(errs, &commitbox.InputError{Field: "fn", Problem: "is nil"})
	}
	return errors.Join(errs...)
}

// once runs one transaction.
func once[R any](ctx context.Context, db Beginner, level pgx.TxIsoLevel, fn func(context.Context, pgx.Tx) (R, error)) (value R, err error) {
	ran := false
	err = pgx.BeginTxFunc(ctx, db, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
		value, err = fn(ctx, tx)
		ran = err == nil
		return err
	})
	if ran && check.CommitLost(err) {
		err = fmt.Errorf("optimistic: %w: %w", ErrOutcomeUnknown, err)
	}
	return value, err
}

// sameConflict says that a conflict expects what an earlier attempt has found to be gone: its function has not read again.
func sameConflict(before, now error) bool {
	var a, b *Error
	return errors.As(before, &a) && errors.As(now, &b) && a.Resource == b.Resource && a.Expected == b.Expected && !a.Pending && !b.Pending
}

// sleep comes back with ctx's error if it ends first.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
