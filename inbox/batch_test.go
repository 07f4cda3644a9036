package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

func messages(n int) []inbox.Message {
	msgs := make([]inbox.Message, n)
	for i := range msgs {
		msgs[i].ID = inbox.ID{Consumer: "c", Message: fmt.Sprintf("m%04d", n-i)}
	}
	return msgs
}

// writeAll queues one effect per message and answers with the message's id.
func writeAll(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]string, error) {
	var batch pgx.Batch
	var ids []string
	for _, m := range msgs {
		batch.Queue(`insert into effect values ($1, '')`, m.ID.String())
		ids = append(ids, m.ID.Message)
	}
	return ids, tx.SendBatch(ctx, &batch).Close()
}

func TestB36_BatchReportsPerItem(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	msgs := messages(10)
	for _, a := range inbox.ProcessBatch(t.Context(), box, msgs[:3], writeAll) {
		if a.Err != nil {
			t.Fatal(a.Err)
		}
	}
	runs := 0
	for i, a := range inbox.ProcessBatch(t.Context(), box, msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]string, error) {
		runs++
		return writeAll(ctx, tx, msgs)
	}) {
		if a.Err != nil || a.Replayed != (i < 3) || a.Value != msgs[i].ID.Message {
			t.Errorf("%d: %+v", i, a)
		}
	}
	if runs != 1 {
		t.Errorf("%d runs", runs)
	}
	for _, m := range msgs {
		w.wantEffects(m.ID, 1)
	}
}

func TestF33_BatchFallsBackOneByOne(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	msgs := messages(6)
	msgs[4].ID.Message = "" // bad input
	bad := msgs[2].ID
	answers := inbox.ProcessBatch(t.Context(), box, msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]string, error) {
		for _, m := range msgs {
			if m.ID == bad {
				return nil, errors.New("bad")
			}
		}
		return writeAll(ctx, tx, msgs)
	})
	for i, a := range answers {
		switch i {
		case 2:
			if !errors.Is(a.Err, inbox.ErrFailed) {
				t.Errorf("the bad one: %v", a.Err)
			}
		case 4:
			if a.Err == nil {
				t.Error("bad input was taken")
			}
		default:
			if a.Err != nil {
				t.Errorf("%d: %v", i, a.Err)
			}
			w.wantEffects(msgs[i].ID, 1)
		}
	}
	w.wantEffects(bad, 0)
	w.wantRow(bad, "failed", 1)
}

func TestF06_BatchWithCopies(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	a, b := inbox.FingerprintOf([]byte("a")), inbox.FingerprintOf([]byte("b"))
	msgs := []inbox.Message{{ID: anID, Fingerprint: a}, {ID: anID, Fingerprint: a}, {ID: anID, Fingerprint: b}, {ID: inbox.ID{Consumer: "other", Message: "m"}}}
	answers := inbox.ProcessBatch(t.Context(), box, msgs, writeAll)
	if answers[0].Err != nil || answers[0].Replayed || answers[1].Err != nil || !answers[1].Replayed || !errors.Is(answers[2].Err, inbox.ErrPayloadMismatch) || answers[3].Err != nil {
		t.Errorf("got %+v", answers)
	}
	w.wantEffects(anID, 1)
	w.wantEffects(msgs[3].ID, 1)
}

func TestBatchLargerThanOneTransaction(t *testing.T) {
	w := newWorld(t)
	msgs := messages(600)
	for i, a := range inbox.ProcessBatch(t.Context(), w.box(inbox.Config{}), msgs, writeAll) {
		if a.Err != nil {
			t.Fatalf("%d: %v", i, a.Err)
		}
	}
	if n := one[int](w, `select count(distinct id)::int from effect`); n != 600 {
		t.Errorf("%d effects", n)
	}
}

func TestBatchOfVoidAndWrongLength(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	msgs := messages(4)
	for _, a := range inbox.ProcessBatch(t.Context(), box, msgs[:2], func(context.Context, pgx.Tx, []inbox.Message) ([]inbox.Void, error) { return nil, nil }) {
		if a.Err != nil || a.Outcome != inbox.Executed {
			t.Errorf("void: %+v", a)
		}
	}
	for _, a := range inbox.ProcessBatch(t.Context(), box, msgs[2:], func(context.Context, pgx.Tx, []inbox.Message) ([]int, error) { return nil, nil }) {
		if !errors.Is(a.Err, inbox.ErrDead) {
			t.Errorf("no values: %+v", a)
		}
	}
}
