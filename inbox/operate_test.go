package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

func TestMarkCompleted(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	held, fresh, dead := inbox.ID{Consumer: "c", Message: "held"}, inbox.ID{Consumer: "c", Message: "fresh"}, inbox.ID{Consumer: "c", Message: "dead"}
	acquire(t, box, held)
	_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: dead}, func(context.Context, pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, inbox.Permanent(errors.New("x"))
	})
	w.wantRow(dead, "dead", 1)
	tx := w.begin()
	if err := inbox.MarkCompleted(t.Context(), tx, held, 1, ""); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("held: %v", err)
	}
	for _, id := range []inbox.ID{fresh, dead, fresh} {
		if err := inbox.MarkCompleted(t.Context(), tx, id, 7, "by hand"); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	w.commit(tx)
	for _, id := range []inbox.ID{fresh, dead} {
		if got, done, err := inbox.IsCompleted[int](t.Context(), box, id); err != nil || !done || got != 7 {
			t.Errorf("%s: %v %v %v", id, got, done, err)
		}
	}
	if _, done, err := inbox.IsCompleted[int](t.Context(), box, held); done || err != nil {
		t.Errorf("held: %v %v", done, err)
	}
	if n := one[int](w, `select count(*)::int from commitbox.audit where action = 'inbox_mark_completed' and reason = 'by hand'`); n != 2 {
		t.Errorf("%d audit rows", n)
	}
}

func TestF32_DiscardLeavesADeadRow(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	if err := box.Discard(t.Context(), anID, "x"); !errors.Is(err, inbox.ErrNotFound) {
		t.Errorf("no row: %v", err)
	}
	_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, errors.New("x") })
	if err := box.Discard(t.Context(), anID, "not wanted"); err != nil {
		t.Fatal(err)
	}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); !errors.Is(err, inbox.ErrDead) {
		t.Errorf("redelivery: %v", err)
	}
	w.wantEffects(anID, 0)
	if n := one[int](w, `select count(*)::int from commitbox.audit where action = 'inbox_discard'`); n != 1 {
		t.Errorf("%d audit rows", n)
	}
}

func TestF18_LateFailureRecordAfterRequeue(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 2})
	tx := w.begin()
	_, seen := inbox.Handle(t.Context(), tx, anID, func(context.Context) (inbox.Void, error) { return inbox.Void{}, errors.New("slow failure") })
	_ = tx.Rollback(t.Context())
	_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, errors.New("x") })
	if _, err := box.Requeue(t.Context(), anID, ""); err != nil {
		t.Fatal(err)
	}
	w.wantRow(anID, "failed", 0)
	if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: anID}, seen); !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("late record: %v", err)
	}
	w.wantRow(anID, "failed", 0)
}

func TestF18_FailureAfterAnotherCompleted(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil {
		t.Fatal(err)
	}
	if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: anID}, errors.New("late")); err != nil {
		t.Errorf("got %v, want nil, which is acked", err)
	}
	w.wantRow(anID, "completed", 1)
}

func TestListGetStats(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for i := range 5 {
		id := inbox.ID{Consumer: "c", Message: fmt.Sprint(i)}
		_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: id, Payload: []byte("p"), TraceID: "t"}, func(context.Context, pgx.Tx) (inbox.Void, error) {
			if i < 3 {
				return inbox.Void{}, errors.New("later")
			}
			return inbox.Void{}, inbox.Permanent(errors.New("never"))
		})
	}
	acquire(t, box, inbox.ID{Consumer: "b", Message: "m"})
	w.exec(`update commitbox.inbox set received_at = '2020-01-01' where status = 'failed'`) // one instant: the id decides
	var seen []string
	for cursor := (inbox.Cursor{}); ; {
		page, err := box.List(t.Context(), inbox.Filter{Consumer: "c", Status: inbox.StatusFailed, After: cursor, Limit: 2})
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range page {
			seen, cursor = append(seen, e.ID.Message), e.Cursor()
		}
		if len(page) < 2 {
			break
		}
	}
	if fmt.Sprint(seen) != "[0 1 2]" {
		t.Errorf("listed %v", seen)
	}
	dead, err := box.List(t.Context(), inbox.Filter{Consumer: "c", Status: inbox.StatusDead})
	if err != nil || len(dead) != 2 || !dead[0].PayloadKept || dead[0].LastError != "never" {
		t.Errorf("dead: %+v, %v", dead, err)
	}
	e, err := box.Get(t.Context(), dead[0].ID)
	if err != nil || string(e.Payload) != "p" || e.Status != inbox.StatusDead || e.TraceID != "t" {
		t.Errorf("get: %+v, %v", e, err)
	}
	stats, err := box.Stats(t.Context(), "c")
	if err != nil || stats.Failed != 3 || stats.Dead != 2 || stats.Pending != 0 || stats.OldestAge <= 0 {
		t.Errorf("stats: %+v, %v", stats, err)
	}
	if names, err := box.Consumers(t.Context()); err != nil || fmt.Sprint(names) != "[b c]" {
		t.Errorf("consumers: %v, %v", names, err)
	}
	if _, err := box.List(t.Context(), inbox.Filter{}); err == nil {
		t.Error("an empty filter was taken")
	}
}

// The SQL functions are called by hand, in a transaction that stays open for as long as the operator looks at it.
func TestDeliveriesDoNotWaitForAnOperator(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for _, function := range []string{"inbox_requeue", "inbox_discard"} {
		id := inbox.ID{Consumer: "c", Message: function}
		msg := inbox.Message{ID: id}
		if err := inbox.RecordFailure(t.Context(), box, msg, errors.New("boom")); !errors.Is(err, inbox.ErrFailed) {
			t.Fatalf("got %v", err)
		}
		w.makeDue(id)
		operator := w.begin()
		if _, err := operator.Exec(t.Context(), `select commitbox.`+function+`($1, $2)`, id.Consumer, id.Message); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if _, err := inbox.Process(ctx, box, msg, effect(id)); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("%s: Process: %v", function, err)
		}
		if _, err := box.Acquire(ctx, msg); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("%s: Acquire: %v", function, err)
		}
		if err := operator.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, err := inbox.Process(ctx, box, msg, effect(id)); err != nil {
			t.Errorf("%s: after the rollback: %v", function, err)
		}
	}
}
