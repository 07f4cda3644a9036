package inbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

type third struct{ A int }

func (third) ResultVersion() byte { return 3 }

type fourth struct{ A int }

func (*fourth) ResultVersion() byte { return 4 }

type unreadable struct{}

func (*unreadable) UnmarshalJSON([]byte) error { panic("unreadable") }

// replays asserts that a replay of a result is the first answer.
func replays[R any](box *inbox.Box, result R) func(*testing.T) {
	return func(t *testing.T) {
		var got [2]string
		id := inbox.ID{Consumer: "c", Message: t.Name()}
		for i := range got {
			res, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(context.Context, pgx.Tx) (R, error) { return result, nil })
			if err != nil || res.Replayed != (i == 1) {
				t.Fatalf("run %d: %+v, %v", i, res, err)
			}
			text, err := json.Marshal(res.Value)
			if err != nil {
				t.Fatal(err)
			}
			got[i] = fmt.Sprintf("%T %s", res.Value, text)
		}
		if got[0] != got[1] {
			t.Errorf("first %s, replayed %s", got[0], got[1])
		}
	}
}

func TestF30_ReplayIsTheFirstAnswer(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	t.Run("any of Void", replays[any](box, inbox.Void{}))
	t.Run("any of bytes", replays[any](box, []byte("x")))
	t.Run("any of nil", replays[any](box, nil))
	t.Run("any of a versioned type", replays[any](box, third{1}))
	t.Run("interface", replays[inbox.Versioned](box, nil))
	t.Run("versioned", replays(box, third{1}))
	t.Run("pointer to versioned", replays(box, &third{1}))
	t.Run("nil pointer to versioned", replays[*third](box, nil))
	t.Run("versioned by a pointer receiver", replays(box, fourth{1}))
	t.Run("pointer to that", replays(box, &fourth{1}))
	t.Run("nil pointer", replays[*int](box, nil))
	t.Run("nil bytes", replays[[]byte](box, nil))
	t.Run("raw JSON", replays(box, json.RawMessage(`{"a" : 1}`)))
}

func TestF30_ReplayIntoATypeWithMethods(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (int, error) { return 1, nil }); err != nil {
		t.Fatal(err)
	}
	for name, replay := range map[string]func() error{
		"pointer to versioned": func() error { _, _, err := inbox.IsCompleted[*third](t.Context(), box, anID); return err },
		"pointer receiver":     func() error { _, _, err := inbox.IsCompleted[fourth](t.Context(), box, anID); return err },
		"panics":               func() error { _, _, err := inbox.IsCompleted[unreadable](t.Context(), box, anID); return err },
	} {
		if err := replay(); !errors.Is(err, inbox.ErrNoResult) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestBatchResultsStayWithTheirMessages(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	msgs := messages(4)
	second := msgs[1].ID
	run := func() (got []any) {
		for i, a := range inbox.ProcessBatch(t.Context(), box, msgs, func(_ context.Context, _ pgx.Tx, msgs []inbox.Message) ([]any, error) {
			values := make([]any, len(msgs))
			for i, m := range msgs {
				if m.ID != second {
					values[i] = m.ID.Message
				}
			}
			return values, nil
		}) {
			want := any(msgs[i].ID.Message)
			if i == 1 {
				want = nil
			}
			if a.Err != nil || a.Value != want {
				t.Errorf("%s: %v, %v", msgs[i].ID, a.Value, a.Err)
			}
			got = append(got, a.Value)
		}
		return got
	}
	if first, replayed := run(), run(); fmt.Sprint(first) != fmt.Sprint(replayed) {
		t.Errorf("first %v, replayed %v", first, replayed)
	}
}
