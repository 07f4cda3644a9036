package inbox_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

var anID = inbox.ID{Consumer: "payments.charge", Message: "evt-1"}

type receipt struct {
	Number int
	Lines  []string
}

func TestProcessReplays(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	runs := 0
	handle := func(ctx context.Context, tx pgx.Tx) (receipt, error) {
		runs++
		return receipt{Number: 7}, write(ctx, tx, anID, "done")
	}
	first, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, handle)
	if err != nil || first.Outcome != inbox.Executed || first.Value.Number != 7 || first.Attempt != 1 {
		t.Fatalf("first: %+v, %v", first, err)
	}
	second, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, handle)
	if err != nil || !second.Replayed || second.Outcome != inbox.Replayed || second.Value.Number != 7 {
		t.Fatalf("second: %+v, %v", second, err)
	}
	if runs != 1 {
		t.Errorf("the handler ran %d times", runs)
	}
	w.wantEffects(anID, 1)
	w.wantRow(anID, "completed", 1)
}

func TestProcessRecordsFailures(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 3})
	msg := inbox.Message{ID: anID, Payload: []byte("bytes"), Headers: map[string]string{"a": "b\x00c"}}
	fail := func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, errors.Join(write(ctx, tx, anID, "partial"), errors.New("bad \x00 \xff day"))
	}
	for attempt := 1; attempt <= 3; attempt++ {
		_, err := inbox.Process(t.Context(), box, msg, fail)
		var e *inbox.Error
		if !errors.As(err, &e) || e.Attempt != attempt {
			t.Fatalf("attempt %d: %v", attempt, err)
		}
		if attempt < 3 && (!errors.Is(err, inbox.ErrFailed) || inbox.Disposition(err).Verdict != inbox.Retry || e.RetryAfter <= 0) {
			t.Fatalf("attempt %d: %v", attempt, err)
		}
		if attempt == 3 && (!errors.Is(err, inbox.ErrDead) || !e.PayloadKept || inbox.Disposition(err).Verdict != inbox.Ack) {
			t.Fatalf("last attempt: %v", err)
		}
		if attempt == 1 {
			if _, err := inbox.Process(t.Context(), box, msg, fail); !errors.Is(err, inbox.ErrNotDue) {
				t.Fatalf("before it is due: %v", err)
			}
		}
		w.makeDue(anID)
	}
	w.wantEffects(anID, 0)
	w.wantRow(anID, "dead", 3)
	if got := one[string](w, `select payload::text || headers::text || last_error from commitbox.inbox`); got != "\\x6279746573{\"a\": \"b\uFFFDc\"}bad \uFFFD \uFFFD day" {
		t.Errorf("the dead row holds %q", got)
	}
	if _, err := inbox.Process(t.Context(), box, msg, fail); !errors.Is(err, inbox.ErrDead) {
		t.Errorf("a dead message: %v", err)
	}
}

func TestProcessRunsAgainAfterFailure(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (int, error) { return 0, errors.New("no") })
	if !errors.Is(err, inbox.ErrFailed) {
		t.Fatal(err)
	}
	w.makeDue(anID)
	res, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (int, error) { return 5, write(ctx, tx, anID, "") })
	if err != nil || res.Outcome != inbox.Executed || res.Attempt != 2 || res.Value != 5 {
		t.Fatalf("%+v, %v", res, err)
	}
	w.wantEffects(anID, 1)
	w.wantRow(anID, "completed", 2)
}

func TestB30_SixteenCopiesAtOnce(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{Wait: patience})
	var runs atomic.Int32
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			res, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (int32, error) {
				return runs.Add(1), write(ctx, tx, anID, "")
			})
			if err != nil || res.Value != 1 {
				t.Errorf("%+v, %v", res, err)
			}
		})
	}
	wg.Wait()
	if runs.Load() != 1 {
		t.Errorf("%d runs", runs.Load())
	}
	w.wantEffects(anID, 1)
}

func TestProcessInProgress(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	res, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		_, err := inbox.Process(context.Background(), box, inbox.Message{ID: anID}, effect(anID))
		if !errors.Is(err, inbox.ErrInProgress) || inbox.Disposition(err).Verdict != inbox.Retry {
			t.Errorf("a copy while the first one runs: %v", err)
		}
		_, err = inbox.Process(ctx, box, inbox.Message{ID: anID}, effect(anID))
		if !errors.Is(err, inbox.ErrNested) {
			t.Errorf("its own id: %v", err)
		}
		return effect(anID)(ctx, tx)
	})
	if err != nil || res.Outcome != inbox.Executed {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
}

func TestF05_HandlerCannotEndTheTransaction(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	var kept pgx.Tx
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		kept = tx
		if err := tx.Commit(ctx); !errors.Is(err, inbox.ErrTxOwned) {
			t.Errorf("Commit: %v", err)
		}
		if err := tx.Rollback(ctx); !errors.Is(err, inbox.ErrTxOwned) {
			t.Errorf("Rollback: %v", err)
		}
		err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return errors.Join(write(ctx, tx, anID, ""), errors.New("undo")) })
		if err == nil {
			t.Error("the savepoint was not undone")
		}
		return inbox.Void{}, pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error { return write(ctx, tx, anID, "") })
	})
	if err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
	if _, err := kept.Exec(t.Context(), `select 1`); !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("the transaction after its end: %v", err)
	}
}

func TestF05_CommitAsText(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		_, err := tx.Exec(ctx, `commit`)
		return inbox.Void{}, errors.Join(err, errors.New("and then fail"))
	})
	if !errors.Is(err, inbox.ErrTxEnded) || inbox.Disposition(err).Verdict != inbox.DeadLetter || inbox.Retryable(err) {
		t.Errorf("got %v", err)
	}
	w.wantRow(anID, "completed", 1)
}

func TestProcessHandlerLeavesAFailedStatement(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		_, _ = tx.Exec(ctx, `select 1/0`)
		return inbox.Void{}, nil
	})
	if !errors.Is(err, inbox.ErrFailed) || !strings.Contains(err.Error(), "statement of its transaction had failed") {
		t.Errorf("got %v", err)
	}
	w.wantRow(anID, "failed", 1)
}

func TestProcessHandlerLeavesRowsOpen(t *testing.T) {
	w := newWorld(t)
	_, err := inbox.Process(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		_, err := tx.Query(ctx, `select generate_series(1, 100000)`)
		return inbox.Void{}, err
	})
	if !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("got %v", err)
	}
	w.wantRow(anID, "failed", 1)
}

func TestB73_PanicAndGoexit(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for i, value := range []any{"boom", errors.New("boom"), nil} {
		id := inbox.ID{Consumer: "c", Message: string(rune('a' + i))}
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			_ = write(ctx, tx, id, "")
			panic(value)
		})
		var p *inbox.PanicError
		if !errors.As(err, &p) || !errors.Is(err, inbox.ErrFailed) {
			t.Errorf("panic(%v): %v", value, err)
		}
		w.wantRow(id, "failed", 1)
		w.wantEffects(id, 0)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			_ = write(ctx, tx, anID, "")
			runtime.Goexit()
			return inbox.Void{}, nil
		})
	}()
	<-done
	w.wantRow(anID, "failed", 1)
	w.wantEffects(anID, 0)
	if n := w.Pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections are out of the pool", n)
	}
}

func TestB34_Mismatch(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	message := func(payload string) inbox.Message {
		return inbox.Message{ID: anID, Payload: []byte(payload), Fingerprint: inbox.FingerprintOf([]byte(payload))}
	}
	if _, err := inbox.Process(t.Context(), box, message("A"), effect(anID)); err != nil {
		t.Fatal(err)
	}
	_, err := inbox.Process(t.Context(), box, message("B"), effect(anID))
	if !errors.Is(err, inbox.ErrPayloadMismatch) || inbox.Disposition(err).Verdict != inbox.DeadLetter {
		t.Errorf("another payload: %v", err)
	}
	if res, err := inbox.Process(t.Context(), box, message("A"), effect(anID)); err != nil || !res.Replayed {
		t.Errorf("the same payload: %+v, %v", res, err)
	}
	w.wantEffects(anID, 1)
}

func TestB31_TwoConsumersBothRun(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for _, consumer := range []string{"billing", "mail", "billing", "mail"} {
		id := inbox.ID{Consumer: consumer, Message: "evt-1"}
		if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, effect(id)); err != nil {
			t.Fatal(err)
		}
	}
	w.wantEffects(inbox.ID{Consumer: "billing", Message: "evt-1"}, 1)
	w.wantEffects(inbox.ID{Consumer: "mail", Message: "evt-1"}, 1)
}
