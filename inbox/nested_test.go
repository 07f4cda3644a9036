package inbox_test

import (
	"context"
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

func TestF06_AnotherSchemaIsNotNested(t *testing.T) {
	w := newWorld(t)
	box, other := w.box(inbox.Config{}), w.box(inbox.Config{Schema: "elsewhere"}) // not migrated: only the refusal is looked at
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, _ pgx.Tx) (inbox.Void, error) {
		_, err := inbox.Process(ctx, other, inbox.Message{ID: anID}, effect(anID))
		if err == nil || errors.Is(err, inbox.ErrNested) {
			t.Errorf("the inbox of another schema: %v", err)
		}
		return inbox.Void{}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestF06_AContextThatOutlivesItsHandlerIsNotNested(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	contexts := make(chan context.Context, 1)
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, _ pgx.Tx) (inbox.Void, error) {
		contexts <- context.WithoutCancel(ctx)
		return inbox.Void{}, errors.New("boom")
	})
	if !errors.Is(err, inbox.ErrFailed) {
		t.Fatalf("got %v", err)
	}
	w.makeDue(anID)
	if _, err := inbox.Process(<-contexts, box, inbox.Message{ID: anID}, effect(anID)); err != nil {
		t.Errorf("the first handler has returned: %v", err)
	}
	w.wantEffects(anID, 1)
}

func TestF06_NestedInABatch(t *testing.T) {
	w := newWorld(t)
	msgs := messages(3)
	for _, a := range inbox.ProcessBatch(t.Context(), w.box(inbox.Config{}), msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]inbox.Void, error) {
		for _, m := range msgs {
			_, err := inbox.Handle(ctx, tx, m.ID, func(context.Context) (inbox.Void, error) { return inbox.Void{}, nil })
			if !errors.Is(err, inbox.ErrNested) {
				t.Errorf("Handle of %s among %d: %v", m.ID, len(msgs), err)
			}
		}
		return nil, nil
	}) {
		if a.Err != nil {
			t.Error(a.Err)
		}
	}
}
