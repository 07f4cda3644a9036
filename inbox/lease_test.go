package inbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

// leaseFor is short enough for a test to see renewals, after a third of it each, and long enough for a busy machine.
const leaseFor = 6 * time.Second

func acquire(t *testing.T, box *inbox.Box, id inbox.ID) *inbox.Lease {
	t.Helper()
	lease, err := box.Acquire(t.Context(), inbox.Message{ID: id, Payload: []byte("p")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = lease.Release(context.Background()) })
	return lease
}

// expire moves the end of a lease into the past.
func (w *world) expire(id inbox.ID) {
	w.t.Helper()
	w.exec(`update commitbox.inbox set lease_until = now() - interval '1 second' where consumer = $1 and message_id = $2 and status = 'pending'`, id.Consumer, id.Message)
}

func TestLeaseCompletes(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	lease := acquire(t, box, anID)
	w.wantRow(anID, "pending", 1)
	_, err := box.Acquire(t.Context(), inbox.Message{ID: anID})
	var e *inbox.Error
	if !errors.Is(err, inbox.ErrInProgress) || !errors.As(err, &e) || e.RetryAfter <= 0 {
		t.Errorf("a second lease: %v", err)
	}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("transaction mode beside a lease: %v", err)
	}
	for range 2 {
		if got, err := inbox.Complete(t.Context(), lease, receipt{Number: 3}); err != nil || got.Number != 3 {
			t.Fatalf("complete: %v, %v", got, err)
		}
	}
	w.wantRow(anID, "completed", 1)
	if got, done, err := inbox.IsCompleted[receipt](t.Context(), box, anID); err != nil || !done || got.Number != 3 {
		t.Errorf("%v %v %v", got, done, err)
	}
	if _, err := box.Acquire(t.Context(), inbox.Message{ID: anID}); inbox.Disposition(err).Verdict != inbox.Ack || !errors.As(err, &e) || e.Outcome != inbox.Replayed {
		t.Errorf("a lease of completed work: %v", err)
	}
}

func TestLeaseTakeoverFencesTheFormerHolder(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	old := acquire(t, box, anID)
	if got, err := inbox.Step(t.Context(), old, "charge", func(context.Context) (int, error) { return 42, nil }); err != nil || got != 42 {
		t.Fatal(got, err)
	}
	w.expire(anID)
	next := acquire(t, box, anID)
	if next.Attempt() != 2 {
		t.Errorf("attempt %d", next.Attempt())
	}
	_, stepErr := inbox.Step(t.Context(), old, "ship", func(context.Context) (int, error) { t.Error("a step of a lost lease ran"); return 0, nil })
	_, completeErr := inbox.Complete(t.Context(), old, inbox.Void{})
	_, inErr := inbox.CompleteIn(t.Context(), old, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, write(ctx, tx, anID, "old")
	})
	for name, err := range map[string]error{"step": stepErr, "complete": completeErr, "complete in": inErr, "fail": old.Fail(t.Context(), errors.New("x"))} {
		if !errors.Is(err, inbox.ErrLeaseLost) || inbox.Disposition(err).Verdict != inbox.Retry {
			t.Errorf("%s of a lost lease: %v", name, err)
		}
	}
	got, err := inbox.Step(t.Context(), next, "charge", func(context.Context) (int, error) { t.Error("the stored step ran again"); return 0, nil })
	if err != nil || got != 42 {
		t.Errorf("the stored step: %v, %v", got, err)
	}
	if _, err := inbox.CompleteIn(t.Context(), next, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, write(ctx, tx, anID, "new")
	}); err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
	w.wantRow(anID, "completed", 2)
}

func TestCompleteInRollsBackWithItsHandler(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	lease := acquire(t, box, anID)
	boom := errors.New("boom")
	_, err := inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (int, error) {
		return 0, errors.Join(write(ctx, tx, anID, ""), boom)
	})
	if !errors.Is(err, boom) {
		t.Fatal(err)
	}
	w.wantRow(anID, "pending", 1)
	w.wantEffects(anID, 0)
	if got, err := inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (int, error) { return 9, write(ctx, tx, anID, "") }); err != nil || got != 9 {
		t.Fatal(got, err)
	}
	w.wantEffects(anID, 1)
	if got, _, err := inbox.IsCompleted[int](t.Context(), box, anID); err != nil || got != 9 {
		t.Errorf("stored %d, %v", got, err)
	}
}

func TestF11_CompletingTransactionMakesNobodyWait(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	lease := acquire(t, box, anID)
	_, err := inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		others, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if _, err := inbox.Process(others, box, inbox.Message{ID: anID}, effect(anID)); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("process: %v", err)
		}
		if _, err := box.Acquire(others, inbox.Message{ID: anID}); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("acquire: %v", err)
		}
		return inbox.Void{}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The completing transaction locks the row, so a renewal finds it locked and asks whether the lease is held still. Two
// such questions show that the first answer did not end the lease.
func TestF12_RenewalBesideACompletingTransaction(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{LeaseFor: leaseFor})
	lease := acquire(t, box, anID)
	watcher, err := pgx.Connect(t.Context(), w.URL) // in the pool it would take the place of what it looks for
	if err != nil {
		t.Fatal(err)
	}
	defer watcher.Close(context.Background())
	_, err = inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		bound, cancel := lease.Bind(ctx)
		defer cancel()
		asked := map[string]bool{}
		w.within(patience, "two renewals", func() bool {
			var last *string
			err := watcher.QueryRow(ctx, `select max(query_start)::text from pg_stat_activity
				where datname = current_database() and state = 'idle' and query like '-- name: InboxHeld %'`).Scan(&last)
			if err != nil {
				t.Error(err)
			}
			if last != nil {
				asked[*last] = true
			}
			return len(asked) >= 2 || bound.Err() != nil || err != nil
		})
		if bound.Err() != nil {
			t.Errorf("the lease was lost: %v", context.Cause(bound))
		}
		return inbox.Void{}, write(ctx, tx, anID, "")
	})
	if err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
}

func TestLeaseIsRenewed(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{LeaseFor: leaseFor})
	acquire(t, box, anID)
	before := one[time.Time](w, `select lease_until from commitbox.inbox`)
	w.within(patience, "a renewal", func() bool {
		return one[time.Time](w, `select lease_until from commitbox.inbox`).After(before)
	})
}

func TestLeaseTellsItsHolderOfTheLoss(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{LeaseFor: leaseFor})
	lease := acquire(t, box, anID)
	bound, cancel := lease.Bind(t.Context())
	defer cancel()
	w.exec(`update commitbox.inbox set epoch = epoch + 1, lease_token = gen_random_uuid()`)
	select {
	case <-bound.Done():
	case <-time.After(patience):
		t.Fatal("the holder was not told")
	}
	if !errors.Is(context.Cause(bound), inbox.ErrLeaseLost) {
		t.Errorf("cause: %v", context.Cause(bound))
	}
}

func TestF24_TransactionModeLeavesStepsAlone(t *testing.T) {
	for _, end := range []string{"expired", "failed"} {
		t.Run(end, func(t *testing.T) {
			w := newWorld(t)
			box := w.box(inbox.Config{})
			lease := acquire(t, box, anID)
			if _, err := inbox.Step(t.Context(), lease, "charge", func(context.Context) (int, error) { return 1, nil }); err != nil {
				t.Fatal(err)
			}
			if end == "failed" {
				_ = lease.Fail(t.Context(), errors.New("x"))
				w.makeDue(anID)
			} else {
				w.expire(anID)
			}
			if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); !errors.Is(err, inbox.ErrInProgress) {
				t.Errorf("got %v", err)
			}
			w.wantEffects(anID, 0)
			next := acquire(t, box, anID)
			if got, err := inbox.Step(t.Context(), next, "charge", func(context.Context) (int, error) { return 2, nil }); err != nil || got != 1 {
				t.Errorf("step: %d, %v", got, err)
			}
		})
	}
}

func TestTransactionModeTakesOverALeaseWithoutSteps(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	lease := acquire(t, box, anID)
	w.expire(anID)
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil {
		t.Fatal(err)
	}
	if _, err := inbox.Complete(t.Context(), lease, 1); !errors.Is(err, inbox.ErrLeaseLost) {
		t.Errorf("the former holder: %v", err)
	}
	w.wantEffects(anID, 1)
	w.wantRow(anID, "completed", 2)
}

func TestF25_CrashLoopEndsDead(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 2})
	for range 2 {
		acquire(t, box, anID)
		w.expire(anID)
	}
	_, err := box.Acquire(t.Context(), inbox.Message{ID: anID})
	var e *inbox.Error
	if !errors.Is(err, inbox.ErrDead) || !errors.As(err, &e) || !e.PayloadKept {
		t.Errorf("got %v", err)
	}
	w.wantRow(anID, "dead", 2)
}

func TestReleaseSpendsNoAttempt(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 1})
	for range 3 {
		lease := acquire(t, box, anID)
		if err := lease.Release(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.wantRow(anID, "failed", 0)
	}
}

func TestProcessLeased(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 2})
	msg := inbox.Message{ID: anID, Payload: []byte("p")}
	charges := 0
	work := func(end func() error) (inbox.Result[int], error) {
		return inbox.ProcessLeased(t.Context(), box, msg, func(ctx context.Context, lease *inbox.Lease) (int, error) {
			n, err := inbox.Step(ctx, lease, "charge", func(context.Context) (int, error) { charges++; return charges, nil })
			return n, errors.Join(err, end())
		})
	}
	if _, err := work(func() error { panic("boom") }); !errors.Is(err, inbox.ErrFailed) {
		t.Fatal(err)
	}
	w.wantRow(anID, "failed", 1)
	w.makeDue(anID)
	res, err := work(func() error { return nil })
	if err != nil || res.Value != 1 || res.Attempt != 2 || charges != 1 {
		t.Fatalf("%+v, %v, %d charges", res, err, charges)
	}
	if res, err := work(func() error { return nil }); err != nil || !res.Replayed || res.Value != 1 {
		t.Errorf("replay: %+v, %v", res, err)
	}
}

func TestF01_ResumeBringsBackWhatNobodyDelivers(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 1})
	crashed, requeued, atBroker := inbox.ID{Consumer: "c", Message: "crashed"}, inbox.ID{Consumer: "c", Message: "requeued"}, inbox.ID{Consumer: "c", Message: "broker"}
	acquire(t, box, crashed)
	w.expire(crashed)
	fail := func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, errors.New("x") }
	_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: requeued, Payload: []byte("r"), Headers: map[string]string{"k": "v"}}, fail)
	_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: atBroker}, fail)
	if kept, err := box.Requeue(t.Context(), requeued, "fixed"); err != nil || !kept {
		t.Fatalf("requeue: %v, %v", kept, err)
	}
	if kept, err := box.Requeue(t.Context(), atBroker, "fixed"); err != nil || kept {
		t.Fatalf("requeue without payload: %v, %v", kept, err)
	}
	box = w.box(inbox.Config{MaxAttempts: 3})
	done, err := inbox.Resume(t.Context(), box, "c", func(ctx context.Context, msg inbox.Message) error {
		if msg.ID == requeued && (string(msg.Payload) != "r" || msg.Headers["k"] != "v") {
			t.Errorf("got %+v", msg)
		}
		_, err := inbox.Process(ctx, box, msg, effect(msg.ID))
		return err
	})
	if err != nil || done != 2 {
		t.Fatalf("%d, %v", done, err)
	}
	w.wantEffects(crashed, 1)
	w.wantEffects(requeued, 1)
	w.wantEffects(atBroker, 0)
}

func TestF22_LaterRowOfTheSameID(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	old := acquire(t, box, anID)
	w.exec(`delete from commitbox.inbox`) // as retention does, long after another holder has completed it
	if _, err := inbox.Complete(t.Context(), acquire(t, box, anID), 1); err != nil {
		t.Fatal(err)
	}
	if _, err := inbox.Complete(t.Context(), old, 2); !errors.Is(err, inbox.ErrLeaseLost) {
		t.Errorf("the holder of the removed row: %v", err)
	}
}

// A transaction-mode handler that takes an expired lease over and fails counts, so that the message ends dead.
func TestFailedTakeoverOfALeaseCounts(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 2})
	lease := acquire(t, box, anID)
	w.expire(anID)
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, errors.New("x") })
	if !errors.Is(err, inbox.ErrDead) {
		t.Errorf("got %v", err)
	}
	w.wantRow(anID, "dead", 2)
	if _, err := inbox.Complete(t.Context(), lease, 1); !errors.Is(err, inbox.ErrLeaseLost) {
		t.Errorf("the former holder: %v", err)
	}
}

// What only the row holds stays there when Handle fails in a transaction that commits.
func TestF01_FailureInHandleKeepsThePayload(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	dead := func(context.Context, pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, inbox.Permanent(errors.New("x"))
	}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID, Payload: []byte(`{"b":1e2,"aa":1.10,"b":2} `)}, dead); !errors.Is(err, inbox.ErrDead) {
		t.Fatal(err)
	}
	if _, err := box.Requeue(t.Context(), anID, ""); err != nil {
		t.Fatal(err)
	}
	tx := w.begin()
	_, err := inbox.Handle(t.Context(), tx, anID, func(context.Context) (inbox.Void, error) { return inbox.Void{}, errors.New("x") })
	if !errors.Is(err, inbox.ErrFailed) {
		t.Fatal(err)
	}
	w.commit(tx)
	e, err := box.Get(t.Context(), anID)
	if err != nil || string(e.Payload) != `{"b":1e2,"aa":1.10,"b":2} ` {
		t.Errorf("the payload is %q, %v", e.Payload, err)
	}
}

// A handler that hides the loss of its lease is not taken for a success.
func TestProcessLeasedWhoseLossIsHidden(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	res, err := inbox.ProcessLeased(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, lease *inbox.Lease) (int, error) {
		w.exec(`update commitbox.inbox set epoch = epoch + 1, lease_token = gen_random_uuid()`)
		_, _ = inbox.Complete(ctx, lease, 1)
		return 1, nil
	})
	if !errors.Is(err, inbox.ErrLeaseLost) || res.Outcome != inbox.InProgress {
		t.Errorf("%+v, %v", res, err)
	}
	w.wantRow(anID, "pending", 1)
}

func TestProcessLeasedEndsInABusinessTransaction(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	res, err := inbox.ProcessLeased(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, lease *inbox.Lease) (int, error) {
		value, err := inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (int, error) { return 8, write(ctx, tx, anID, "") })
		select {
		case <-ctx.Done():
			t.Error("the end of the lease by its own holder ended the handler's context")
		case <-time.After(100 * time.Millisecond):
		}
		return value, err
	})
	if err != nil || res.Value != 8 || res.Outcome != inbox.Executed {
		t.Errorf("%+v, %v", res, err)
	}
	w.wantEffects(anID, 1)
	w.wantRow(anID, "completed", 1)
}
