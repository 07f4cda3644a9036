package inbox_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

// panickyResult cannot be encoded.
type panickyResult struct{}

func (panickyResult) MarshalJSON() ([]byte, error) { panic("marshal") }

// However ProcessLeased ends, the failure is recorded and nobody holds the message any more.
func TestProcessLeasedEndsItsLeaseWhateverUnwinds(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	msg := func(name string) inbox.Message { return inbox.Message{ID: inbox.ID{Consumer: "c", Message: name}} }
	_, err1 := inbox.ProcessLeased(t.Context(), box, msg("result"), func(context.Context, *inbox.Lease) (panickyResult, error) {
		return panickyResult{}, nil
	})
	_, err2 := inbox.ProcessLeased(t.Context(), box, msg("error"), func(context.Context, *inbox.Lease) (int, error) {
		return 0, unsoundErrors["typed nil"]
	})
	var err3 error
	_, err4 := inbox.ProcessLeased(t.Context(), box, msg("fail"), func(ctx context.Context, lease *inbox.Lease) (int, error) {
		err3 = lease.Fail(ctx, unsoundErrors["typed nil"])
		return 0, err3
	})
	for name, err := range map[string]error{"result": err1, "error": err2, "fail": err3} {
		var panicked *inbox.PanicError
		if !errors.Is(err, inbox.ErrFailed) || !errors.As(err, &panicked) {
			t.Errorf("%s: %v", name, err)
		}
		w.wantRow(msg(name).ID, "failed", 1)
	}
	if err4 == nil {
		t.Error("a handler that failed its lease by itself succeeded")
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		_, _ = inbox.ProcessLeased(t.Context(), box, msg("goexit"), func(context.Context, *inbox.Lease) (int, error) {
			t.SkipNow()
			return 0, nil
		})
	})
	wg.Wait()
	w.wantRow(msg("goexit").ID, "failed", 1)
}

// A handler that ends its completing transaction may have committed half of its work: that is what is reported, and the
// row is left as it is.
func TestCompleteInWhoseTransactionWasEnded(t *testing.T) {
	second := errors.New("second half failed")
	for name, c := range map[string]struct {
		sql    string
		err    error
		status string
	}{
		"commit": {"commit", nil, "completed"}, "commit and fail": {"commit", second, "completed"}, "rollback": {"rollback", second, "pending"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			box := w.box(inbox.Config{})
			_, err := inbox.ProcessLeased(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, lease *inbox.Lease) (inbox.Void, error) {
				return inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
					_, err := tx.Exec(ctx, c.sql)
					return inbox.Void{}, errors.Join(err, c.err)
				})
			})
			if !errors.Is(err, inbox.ErrTxEnded) || !errors.Is(err, c.err) && c.err != nil || inbox.Disposition(err).Verdict != inbox.DeadLetter {
				t.Errorf("got %v, %+v", err, inbox.Disposition(err))
			}
			w.wantRow(anID, c.status, 1)
		})
	}
}

func TestCompleteInWithAFailedStatement(t *testing.T) {
	w := newWorld(t)
	lease := acquire(t, w.box(inbox.Config{}), anID)
	_, err := inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, _ = tx.Exec(ctx, `select 1/0`)
		return 1, nil
	})
	if err == nil || errors.Is(err, pgx.ErrTxCommitRollback) {
		t.Errorf("an error that the handler has hidden: %v", err)
	}
	_, err = inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (int, error) {
		_, err := tx.Query(ctx, `select generate_series(1, 9)`)
		return 1, err
	})
	if err == nil {
		t.Error("rows that are open were not noticed")
	}
	w.wantRow(anID, "pending", 1)
}

func TestF6_NestedInCompleteIn(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	none := func(context.Context) (inbox.Void, error) { t.Error("the nested handler ran"); return inbox.Void{}, nil }
	_, err := inbox.CompleteIn(t.Context(), acquire(t, box, anID), func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		_, err1 := inbox.Handle(ctx, tx, anID, none)
		_, err2 := inbox.Process(ctx, box, inbox.Message{ID: anID}, func(ctx context.Context, _ pgx.Tx) (inbox.Void, error) { return none(ctx) })
		if !errors.Is(err1, inbox.ErrNested) || !errors.Is(err2, inbox.ErrNested) {
			t.Errorf("handle: %v, process: %v", err1, err2)
		}
		return inbox.Void{}, nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestCompleteInTwiceIsOnce(t *testing.T) {
	w := newWorld(t)
	lease := acquire(t, w.box(inbox.Config{}), anID)
	for i := range 2 {
		got, err := inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (int, error) { return 5 + i, write(ctx, tx, anID, "") })
		if err != nil || got != 5 {
			t.Errorf("call %d: %d, %v", i, got, err)
		}
	}
	w.wantEffects(anID, 1)
}

func TestStepRunsOnceAtATime(t *testing.T) {
	w := newWorld(t)
	lease := acquire(t, w.box(inbox.Config{}), anID)
	runs, inside := 0, make(chan struct{})
	var got [2]int
	var errs [2]error
	var wg sync.WaitGroup
	for i := range got {
		wg.Go(func() {
			got[i], errs[i] = inbox.Step(t.Context(), lease, "charge", func(context.Context) (int, error) {
				runs++ // the race detector sees it if two run
				close(inside)
				time.Sleep(100 * time.Millisecond)
				return 42, nil
			})
		})
	}
	<-inside
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := inbox.Step(ended, lease, "charge", func(context.Context) (int, error) { return 1, nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("a call that no longer waits: %v", err)
	}
	if other, err := inbox.Step(t.Context(), lease, "other", func(context.Context) (int, error) { return 7, nil }); err != nil || other != 7 {
		t.Errorf("another name: %d, %v", other, err)
	}
	wg.Wait()
	if runs != 1 || got != [2]int{42, 42} || errors.Join(errs[:]...) != nil {
		t.Errorf("%d runs, %v, %v", runs, got, errs)
	}
}

func TestStepWhoseLeaseIsLostMeanwhileIsNotStored(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	lease := acquire(t, box, anID)
	_, err := inbox.Step(t.Context(), lease, "charge", func(context.Context) (int, error) {
		w.expire(anID)
		acquire(t, box, anID)
		return 1, nil
	})
	if !errors.Is(err, inbox.ErrLeaseLost) {
		t.Errorf("got %v", err)
	}
	if n := one[int](w, `select count(*)::int from commitbox.inbox_step`); n != 0 {
		t.Errorf("%d steps are stored", n)
	}
	heard(t, lease)
}

// Work that nobody holds is never said to be in progress.
func TestAcquireOfFailedWork(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for name, withStep := range map[string]bool{"plain": false, "with a step": true} {
		id := inbox.ID{Consumer: "c", Message: name}
		lease := acquire(t, box, id)
		if withStep {
			if _, err := inbox.Step(t.Context(), lease, "s", func(context.Context) (int, error) { return 1, nil }); err != nil {
				t.Fatal(err)
			}
		}
		_ = lease.Fail(t.Context(), errors.New("x"))
		_, err := box.Acquire(t.Context(), inbox.Message{ID: id})
		var e *inbox.Error
		if !errors.Is(err, inbox.ErrNotDue) || !errors.As(err, &e) || e.RetryAfter <= 0 {
			t.Errorf("%s, not due: %v", name, err)
		}
		_, err = w.box(inbox.Config{MaxAttempts: 1}).Acquire(t.Context(), inbox.Message{ID: id})
		if !errors.Is(err, inbox.ErrDead) || !errors.As(err, &e) || !e.PayloadKept {
			t.Errorf("%s, over the limit: %v", name, err)
		}
		w.wantRow(id, "dead", 1)
	}
}
