package inbox_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

func TestRecordFailureAfterACommittedFailureCountsOnce(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for attempt := 1; attempt <= 2; attempt++ {
		tx := w.begin()
		_, err := inbox.Handle(t.Context(), tx, anID, func(context.Context) (inbox.Void, error) { return inbox.Void{}, errors.New("boom") }, inbox.Using(box))
		if !errors.Is(err, inbox.ErrFailed) {
			t.Fatalf("got %v", err)
		}
		w.commit(tx)
		if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: anID}, err); inbox.Disposition(err).Verdict != inbox.Retry {
			t.Errorf("RecordFailure: %v", err)
		}
		w.wantRow(anID, "failed", attempt)
		w.makeDue(anID)
	}
}

func TestF09_AFailingCopyWithAnotherPayloadChangesNothing(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 2})
	first := inbox.Message{ID: anID, Payload: []byte("a"), Fingerprint: inbox.FingerprintOf([]byte("a"))}
	other := inbox.Message{ID: anID, Payload: []byte("b"), Fingerprint: inbox.FingerprintOf([]byte("b"))}
	boom := errors.New("boom")
	if err := inbox.RecordFailure(t.Context(), box, first, boom); !errors.Is(err, inbox.ErrFailed) {
		t.Fatalf("got %v", err)
	}
	if err := inbox.RecordFailure(t.Context(), box, other, boom); !errors.Is(err, inbox.ErrPayloadMismatch) {
		t.Errorf("another payload: %v", err)
	}
	w.wantRow(anID, "failed", 1)
	if err := inbox.RecordFailure(t.Context(), box, first, boom); !errors.Is(err, inbox.ErrDead) {
		t.Errorf("got %v", err)
	}
	if got := one[string](w, `select convert_from(payload, 'utf8') from commitbox.inbox`); got != "a" {
		t.Errorf("the row keeps the payload %q", got)
	}
}

func TestDispositionIsThatOfTheOutermostMessage(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	inner := inbox.ID{Consumer: "c", Message: "inner"}
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, _ pgx.Tx) (inbox.Void, error) {
		_, err := inbox.Process(ctx, box, inbox.Message{ID: inner}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			_, err := tx.Exec(ctx, `commit`)
			return inbox.Void{}, err
		})
		return inbox.Void{}, err
	})
	if !errors.Is(err, inbox.ErrFailed) || inbox.Disposition(err).Verdict != inbox.Retry || !inbox.Retryable(err) {
		t.Errorf("a message that failed because another one's transaction was ended: %v, %+v", err, inbox.Disposition(err))
	}
	w.wantRow(anID, "failed", 1)
}

func TestErrTxEndedCausedByAnotherMessage(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	inner := &inbox.Error{ID: inbox.ID{Consumer: "c", Message: "inner"}, Err: inbox.ErrTxEnded}
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		_, err := tx.Exec(ctx, `commit`)
		return inbox.Void{}, errors.Join(err, inner)
	})
	if inbox.Disposition(err).Verdict != inbox.DeadLetter || inbox.Retryable(err) {
		t.Errorf("both ended theirs: %v, %+v", err, inbox.Disposition(err))
	}
	if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: anID}, err); inbox.Disposition(err).Verdict != inbox.DeadLetter {
		t.Errorf("RecordFailure: %v", err)
	}
	w.wantRow(anID, "completed", 1)
}
