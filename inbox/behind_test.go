package inbox_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
)

// What a batch handler can leave behind without an error. One message of the batch is the one that does.
func TestBatchHandlerLeavesSomethingBehind(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for name, leave := range map[string]func(context.Context, pgx.Tx) error{
		"a failed statement": func(ctx context.Context, tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, `select 1/0`); err == nil {
				return errors.New("no error")
			}
			return nil
		},
		"open rows": func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Query(ctx, `select generate_series(1, 100000)`)
			return err
		},
	} {
		msgs := messages(3)
		for i := range msgs {
			msgs[i].ID.Consumer = name
		}
		bad := msgs[0].ID
		answers := inbox.ProcessBatch(t.Context(), box, msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]inbox.Void, error) {
			_, err := writeAll(ctx, tx, msgs)
			if err == nil && slices.ContainsFunc(msgs, func(m inbox.Message) bool { return m.ID == bad }) {
				err = leave(ctx, tx)
			}
			return nil, err
		})
		for i, a := range answers {
			if want := map[bool]error{true: inbox.ErrFailed}[i == 0]; !errors.Is(a.Err, want) {
				t.Errorf("%s: message %d: %v", name, i, a.Err)
			}
			w.wantEffects(msgs[i].ID, min(i, 1))
		}
		w.wantRow(bad, "failed", 1)
	}
}

func TestF05_BatchHandlerThatCommits(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for name, result := range map[string]error{"and succeeds": nil, "and fails": errors.New("boom")} {
		msgs := messages(3)
		for i := range msgs {
			msgs[i].ID.Consumer = name
		}
		if _, err := inbox.Process(t.Context(), box, msgs[2], effect(msgs[2].ID)); err != nil {
			t.Fatal(err)
		}
		runs := 0
		answers := inbox.ProcessBatch(t.Context(), box, msgs, func(ctx context.Context, tx pgx.Tx, _ []inbox.Message) ([]inbox.Void, error) {
			runs++
			_, err := tx.Exec(ctx, `commit`)
			return nil, errors.Join(err, result)
		})
		for i, a := range answers[:2] {
			if !errors.Is(a.Err, inbox.ErrTxEnded) || inbox.Disposition(a.Err).Verdict != inbox.DeadLetter || !errors.Is(a.Err, result) && result != nil {
				t.Errorf("%s: message %d: %v", name, i, a.Err)
			}
		}
		if answers[2].Err != nil || !answers[2].Replayed || runs != 1 {
			t.Errorf("%s: the duplicate: %+v; %d runs", name, answers[2], runs)
		}
	}
}

func TestF21_TheStoreIsAwayAfterALostCommit(t *testing.T) {
	w, box, proxy := proxied(t, inbox.Config{CommitWait: patience})
	runs := 0
	res, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		runs++
		cut := proxy.CutAfter(commitOnTheWire)
		proxy.Refuse(true)
		go func() {
			<-cut
			time.Sleep(500 * time.Millisecond) // a few refused connections
			proxy.Refuse(false)
		}()
		return inbox.Void{}, write(ctx, tx, anID, "")
	})
	if err != nil || !res.Replayed || runs != 1 {
		t.Errorf("%+v, %v, %d runs", res, err, runs)
	}
	w.wantEffects(anID, 1)
}

// A pool of one connection: whatever is recorded afterwards needs the one that the message had.
func TestPoolOfOneConnection(t *testing.T) {
	w := newWorld(t)
	cfg, err := pgxpool.ParseConfig(w.URL)
	if err != nil {
		t.Fatal(err)
	}
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	boxOf := func(attempts int) *inbox.Box {
		box, err := inbox.New(pool, inbox.Config{Logger: quiet, MaxAttempts: attempts, BackoffBase: time.Hour, BackoffMax: time.Hour, IgnoreDue: true})
		if err != nil {
			t.Fatal(err)
		}
		return box
	}
	box := boxOf(3)
	for attempt := 1; attempt <= 2; attempt++ {
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (inbox.Void, error) {
			return inbox.Void{}, errors.New("boom")
		})
		if !errors.Is(err, inbox.ErrFailed) {
			t.Fatalf("attempt %d: %v", attempt, err)
		}
	}
	if _, err := inbox.Process(t.Context(), boxOf(1), inbox.Message{ID: anID}, effect(anID)); !errors.Is(err, inbox.ErrDead) {
		t.Errorf("with a lowered limit: %v", err)
	}
	w.wantRow(anID, "dead", 2)
	over := inbox.ID{Consumer: "c", Message: "over"}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: over, Delivery: 1000}, effect(over)); err != nil {
		t.Errorf("delivered too often: %v", err)
	}
}
