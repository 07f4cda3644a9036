package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
)

// A2: the dedup table's life of a message. The handler runs inside the transaction, a failure survives the rollback, the
// result is stored, and every change of state is guarded.
func TestA2_TableManager(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{ResultMax: 100})
	msg := inbox.Message{ID: anID}
	attempt := func(end error) error {
		_, err := inbox.Process(t.Context(), box, msg, func(ctx context.Context, tx pgx.Tx) (string, error) {
			w.wantEffects(anID, 0) // not visible before the commit
			return "receipt", errors.Join(write(ctx, tx, anID, ""), end)
		})
		return err
	}
	if err := attempt(errors.New("x")); !errors.Is(err, inbox.ErrFailed) {
		t.Fatal(err)
	}
	w.wantRow(anID, "failed", 1)
	w.makeDue(anID)
	if err := attempt(nil); err != nil {
		t.Fatal(err)
	}
	w.wantRow(anID, "completed", 2)
	w.wantEffects(anID, 1)
	if got, done, err := inbox.IsCompleted[string](t.Context(), box, anID); got != "receipt" || !done || err != nil {
		t.Errorf("%q, %v, %v", got, done, err)
	}
	if _, err := box.Requeue(t.Context(), anID, ""); !errors.Is(err, inbox.ErrNotFound) {
		t.Errorf("completed is final, yet requeue answers %v", err)
	}
	if err := box.Discard(t.Context(), anID, ""); !errors.Is(err, inbox.ErrNotFound) {
		t.Errorf("completed is final, yet discard answers %v", err)
	}
}

// A4: what a consumer does with each outcome: ack only what is completed or recorded dead with its payload, never what
// is in progress; every outcome has an answer.
func TestA4_ConsumerContract(t *testing.T) {
	second := time.Second
	for _, c := range []struct {
		err  error
		want inbox.Action
	}{
		{nil, inbox.Action{Verdict: inbox.Ack}},
		{&inbox.Error{Outcome: inbox.Replayed, Err: inbox.ErrNoResult}, inbox.Action{Verdict: inbox.Ack}},
		{&inbox.Error{Outcome: inbox.InProgress}, inbox.Action{Verdict: inbox.Retry, After: second}},
		{&inbox.Error{Outcome: inbox.InProgress, RetryAfter: 9 * second}, inbox.Action{Verdict: inbox.Retry, After: 9 * second}},
		{&inbox.Error{Outcome: inbox.Failed, RetryAfter: 3 * second}, inbox.Action{Verdict: inbox.Retry, After: 3 * second}},
		{&inbox.Error{Outcome: inbox.NotDue, RetryAfter: 2 * second}, inbox.Action{Verdict: inbox.Retry, After: 2 * second}},
		{&inbox.Error{Outcome: inbox.Unavailable}, inbox.Action{Verdict: inbox.Retry, After: second}},
		{&inbox.Error{Outcome: inbox.Unknown}, inbox.Action{Verdict: inbox.Retry, After: second}},
		{&inbox.Error{Outcome: inbox.Mismatch}, inbox.Action{Verdict: inbox.DeadLetter}},
		{&inbox.Error{Outcome: inbox.Dead}, inbox.Action{Verdict: inbox.DeadLetter}},
		{&inbox.Error{Outcome: inbox.Dead, PayloadKept: true}, inbox.Action{Verdict: inbox.Ack}},
		{&inbox.Error{Outcome: inbox.Failed, Err: inbox.ErrTxEnded}, inbox.Action{Verdict: inbox.DeadLetter}},
		{&commitbox.InputError{Field: "ID.Message", Problem: "is empty"}, inbox.Action{Verdict: inbox.DeadLetter}},
		{&inbox.Error{Outcome: inbox.Failed, Err: &commitbox.InputError{}}, inbox.Action{Verdict: inbox.Retry, After: second}},
		{errors.New("the caller's"), inbox.Action{Verdict: inbox.Retry, After: second}},
	} {
		err := c.err
		if err != nil {
			err = fmt.Errorf("consumer: %w", err)
		}
		if got := inbox.Disposition(err); got != c.want {
			t.Errorf("%v: %v after %v, want %v after %v", c.err, got.Verdict, got.After, c.want.Verdict, c.want.After)
		}
	}
	for _, code := range []string{"40001", "40P01", "08006", "57P01"} {
		if !inbox.Retryable(fmt.Errorf("commit: %w", &pgconn.PgError{Code: code})) {
			t.Errorf("%s at the caller's commit is not retryable", code)
		}
	}
	if inbox.Retryable(nil) || inbox.Retryable(errors.New("x")) || inbox.Retryable(&commitbox.InputError{}) {
		t.Error("what will not change is retryable")
	}
}

// B1: a wrapper around a handler that undoes its mark when the work fails, so that a retry runs, in both modes.
func TestB1_WrapperUndoesItsMark(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{IgnoreDue: true})
	for _, mode := range []string{"transaction", "lease"} {
		id := inbox.ID{Consumer: mode, Message: "m"}
		runs := 0
		work := func() error {
			if runs++; runs < 3 {
				return errors.New("not yet")
			}
			return nil
		}
		call := func() (err error) {
			if mode == "lease" {
				_, err = inbox.ProcessLeased(t.Context(), box, inbox.Message{ID: id}, func(context.Context, *inbox.Lease) (inbox.Void, error) { return inbox.Void{}, work() })
			} else {
				_, err = inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, work() })
			}
			return err
		}
		for range 2 {
			if err := call(); !errors.Is(err, inbox.ErrFailed) {
				t.Errorf("%s: %v", mode, err)
			}
		}
		for range 2 {
			if err := call(); err != nil {
				t.Errorf("%s: %v", mode, err)
			}
		}
		if runs != 3 {
			t.Errorf("%s: %d runs", mode, runs)
		}
	}
}

// B3: the check takes the caller's transaction, and neither a duplicate nor a refusal aborts it.
func TestB3_CheckInTheCallersTransaction(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	done, held, dead, late := inbox.ID{Consumer: "c", Message: "done"}, inbox.ID{Consumer: "c", Message: "held"}, inbox.ID{Consumer: "c", Message: "dead"}, inbox.ID{Consumer: "c", Message: "late"}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: done}, effect(done)); err != nil {
		t.Fatal(err)
	}
	acquire(t, box, held)
	_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: dead}, func(context.Context, pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, inbox.Permanent(errors.New("x"))
	})
	_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: late}, func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, errors.New("x") })
	for _, level := range levels {
		tx := w.begin(pgx.TxOptions{IsoLevel: level})
		for id, want := range map[inbox.ID]error{done: nil, held: inbox.ErrInProgress, dead: inbox.ErrDead, late: inbox.ErrNotDue} {
			_, err := inbox.Handle(t.Context(), tx, id, func(context.Context) (inbox.Void, error) { t.Errorf("%s ran", id); return inbox.Void{}, nil })
			if !errors.Is(err, want) {
				t.Errorf("%s, %s: %v", level, id, err)
			}
		}
		if err := write(t.Context(), tx, anID, string(level)); err != nil {
			t.Fatal(err)
		}
		w.commit(tx)
	}
	w.wantEffects(anID, len(levels))
}

// B10: the result and the metric say who decided: the row, whether the handler ran, had run or failed.
func TestB10_ResultSaysWhoDecided(t *testing.T) {
	w := newWorld(t)
	seen := &labels{}
	box := w.box(inbox.Config{Observer: seen})
	msg := inbox.Message{ID: anID}
	for _, end := range []error{errors.New("x"), nil, nil} {
		res, err := inbox.Process(t.Context(), box, msg, func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, end })
		if res.DecidedBy != inbox.ByTable || errors.Is(err, inbox.ErrFailed) != (end != nil) {
			t.Errorf("decided by %s, %v", res.DecidedBy, err)
		}
		w.makeDue(anID)
	}
	want := []string{"payments.charge failed table", "payments.charge executed table", "payments.charge replayed table"}
	if !slices.Equal(seen.handled, want) {
		t.Errorf("the metric's labels are %q, want %q", seen.handled, want)
	}
	if names := fmt.Sprint(inbox.ByTable, inbox.ByCache, inbox.ByOff); names != "table cache off" {
		t.Errorf("the deciders are called %s", names)
	}
}

// labels collects those of [commitbox.InboxHandled]. Calls come from the goroutine of Process.
type labels struct{ handled []string }

func (l *labels) Observe(m *commitbox.Metric, _ float64, values ...string) {
	if m == commitbox.InboxHandled {
		l.handled = append(l.handled, strings.Join(values, " "))
	}
}

func TestF18_RecordLeavesOtherStatesAlone(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for _, c := range []struct {
		status string
		set    string
		want   error
	}{
		{"completed", `attempts = 1, finished_at = now()`, nil},
		{"dead", `attempts = 1, finished_at = now()`, inbox.ErrDead},
		{"pending", `attempts = 1, epoch = 1, lease_token = gen_random_uuid(), lease_until = now() + interval '1 hour'`, inbox.ErrInProgress},
	} {
		id := inbox.ID{Consumer: "c", Message: c.status}
		w.exec(`insert into commitbox.inbox (consumer, message_id, status, attempts, next_attempt_at) values ('c', $1, 'failed', 1, now())`, c.status)
		w.exec(fmt.Sprintf(`update commitbox.inbox set next_attempt_at = null, status = '%s', %s where message_id = '%s'`, c.status, c.set, c.status))
		if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: id}, errors.New("late")); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", c.status, err)
		}
		w.wantRow(id, c.status, 1)
	}
	refused := &inbox.Error{ID: anID, Outcome: inbox.NotDue}
	if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: anID}, refused); !errors.Is(err, inbox.ErrNotDue) {
		t.Errorf("a refusal is recorded as a failure: %v", err)
	}
	if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: anID}, &pgconn.PgError{Code: "40001"}); !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("a serialization failure: %v", err)
	}
	w.wantRow(anID, "", 0)
	for attempt := 1; attempt <= 2; attempt++ {
		if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: anID}, errors.New("at commit")); !errors.Is(err, inbox.ErrFailed) {
			t.Errorf("the caller's own failure: %v", err)
		}
		w.wantRow(anID, "failed", attempt)
	}
}
