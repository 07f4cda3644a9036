package inbox_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
)

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func TestHandleReplaysAtEveryLevel(t *testing.T) {
	w := newWorld(t)
	for _, level := range levels {
		id := inbox.ID{Consumer: "c", Message: string(level)}
		for range 2 {
			tx := w.begin(pgx.TxOptions{IsoLevel: level})
			res, err := inbox.Handle(t.Context(), tx, id, func(ctx context.Context) (string, error) { return "yes", write(ctx, tx, id, "") })
			if err != nil || res.Value != "yes" {
				t.Fatalf("%s: %+v, %v", level, res, err)
			}
			w.exec(`select 1`)
			w.commit(tx)
		}
		w.wantEffects(id, 1)
		w.wantRow(id, "completed", 1)
	}
}

func TestHandleFailure(t *testing.T) {
	boom := errors.New("boom")
	for _, c := range []struct {
		name string
		end  func(ctx context.Context, tx pgx.Tx) error
	}{
		{"error", func(context.Context, pgx.Tx) error { return boom }},
		{"failed statement", func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `select 1/0`)
			return errors.Join(boom, err)
		}},
		{"failed statement, no error", func(ctx context.Context, tx pgx.Tx) error {
			_, _ = tx.Exec(ctx, `select 1/0`)
			return nil
		}},
		{"savepoint left open", func(ctx context.Context, tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `savepoint mine`)
			return errors.Join(boom, err)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := newWorld(t)
			tx := w.begin()
			_, err := inbox.Handle(t.Context(), tx, anID, func(ctx context.Context) (inbox.Void, error) {
				return inbox.Void{}, errors.Join(write(ctx, tx, anID, "partial"), c.end(ctx, tx))
			})
			if !errors.Is(err, inbox.ErrFailed) && !errors.Is(err, inbox.ErrDead) {
				t.Fatalf("got %v", err)
			}
			if err := write(t.Context(), tx, anID, "after"); err != nil {
				t.Fatalf("the transaction is unusable: %v", err)
			}
			w.commit(tx)
			w.wantEffects(anID, 1)
			if status := one[string](w, `select status from commitbox.inbox`); status == "completed" {
				t.Error("the row is completed")
			}
		})
	}
}

func TestF03_NoSavepointSpoilsTheTransaction(t *testing.T) {
	w := newWorld(t)
	tx := w.begin()
	_, err := inbox.Handle(t.Context(), tx, anID, func(ctx context.Context) (inbox.Void, error) {
		return inbox.Void{}, errors.Join(write(ctx, tx, anID, "partial"), errors.New("boom"))
	}, inbox.NoSavepoint())
	if !errors.Is(err, inbox.ErrFailed) {
		t.Fatalf("got %v", err)
	}
	if err := tx.Commit(t.Context()); !errors.Is(err, pgx.ErrTxCommitRollback) {
		t.Errorf("commit: %v", err)
	}
	w.wantEffects(anID, 0)
	w.wantRow(anID, "", 0)
	if err := inbox.RecordFailure(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, err); !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("RecordFailure: %v", err)
	}
	w.wantRow(anID, "failed", 1)
}

func TestF04_CancelledContextLeavesNothingCompleted(t *testing.T) {
	w := newWorld(t)
	tx := w.begin()
	ctx, cancel := context.WithCancel(t.Context())
	_, err := inbox.Handle(ctx, tx, anID, func(ctx context.Context) (inbox.Void, error) {
		err := write(ctx, tx, anID, "partial")
		cancel()
		return inbox.Void{}, errors.Join(err, ctx.Err())
	})
	if !errors.Is(err, inbox.ErrFailed) || !errors.Is(err, context.Canceled) {
		t.Fatalf("got %v", err)
	}
	w.commit(tx)
	w.wantEffects(anID, 0)
	w.wantRow(anID, "failed", 1)
}

func TestF04_PanicAndGoexit(t *testing.T) {
	w := newWorld(t)
	for name, end := range map[string]func(){"panic": func() { panic("boom") }, "goexit": runtime.Goexit} {
		id := inbox.ID{Consumer: "c", Message: name}
		tx := w.begin()
		done := make(chan struct{})
		go func() {
			defer close(done)
			defer func() { _ = recover() }()
			_, _ = inbox.Handle(context.Background(), tx, id, func(ctx context.Context) (inbox.Void, error) {
				_ = write(ctx, tx, id, "partial")
				end()
				return inbox.Void{}, nil
			})
		}()
		<-done
		w.commit(tx)
		w.wantEffects(id, 0)
		w.wantRow(id, "failed", 1)
	}
}

func TestF05_HandleWhoseHandlerCommits(t *testing.T) {
	for _, asText := range []bool{false, true} {
		w := newWorldIn(t)
		tx := w.begin()
		_, err := inbox.Handle(t.Context(), tx, anID, func(ctx context.Context) (inbox.Void, error) {
			if asText {
				_, err := tx.Exec(ctx, `commit`)
				return inbox.Void{}, err
			}
			return inbox.Void{}, tx.Commit(ctx)
		}, inbox.NoSavepoint())
		if !errors.Is(err, inbox.ErrTxEnded) || inbox.Disposition(err).Verdict != inbox.DeadLetter {
			t.Errorf("as text %v: %v", asText, err)
		}
	}
}

func TestF06_SameIDInOneTransaction(t *testing.T) {
	w := newWorld(t)
	tx := w.begin()
	other := inbox.ID{Consumer: "c", Message: "other"}
	_, err := inbox.Handle(t.Context(), tx, anID, func(ctx context.Context) (inbox.Void, error) {
		_, err := inbox.Handle(ctx, tx, anID, func(context.Context) (inbox.Void, error) {
			t.Error("the nested handler ran")
			return inbox.Void{}, nil
		})
		if !errors.Is(err, inbox.ErrNested) {
			t.Errorf("nested: %v", err)
		}
		_, err = inbox.Handle(ctx, tx, other, func(ctx context.Context) (inbox.Void, error) { return inbox.Void{}, write(ctx, tx, other, "") })
		return inbox.Void{}, errors.Join(err, write(ctx, tx, anID, ""))
	})
	if err != nil {
		t.Fatal(err)
	}
	w.commit(tx)
	w.wantEffects(anID, 1)
	w.wantEffects(other, 1)
}

func TestB36_DuplicateLeavesTheTransactionUsable(t *testing.T) {
	w := newWorld(t)
	if _, err := inbox.Process(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, effect(anID)); err != nil {
		t.Fatal(err)
	}
	tx := w.begin()
	res, err := inbox.Handle(t.Context(), tx, anID, func(context.Context) (inbox.Void, error) { return inbox.Void{}, errors.New("ran") })
	if err != nil || !res.Replayed {
		t.Fatalf("%+v, %v", res, err)
	}
	if err := write(t.Context(), tx, anID, "caller"); err != nil {
		t.Fatal(err)
	}
	w.commit(tx)
	w.wantEffects(anID, 2)
}

func TestBadInputLeavesTheTransactionUsable(t *testing.T) {
	w := newWorld(t)
	ok := func(context.Context) (inbox.Void, error) { return inbox.Void{}, nil }
	tx := w.begin()
	for _, c := range []struct {
		name  string
		id    inbox.ID
		fn    func(context.Context) (inbox.Void, error)
		print []byte
		field string
		limit int
	}{
		{"no consumer", inbox.ID{Message: "m"}, ok, nil, "ID.Consumer", 200},
		{"no message", inbox.ID{Consumer: "c"}, ok, nil, "ID.Message", 512},
		{"long consumer", inbox.ID{Consumer: strings.Repeat("c", 201), Message: "m"}, ok, nil, "ID.Consumer", 200},
		{"long message", inbox.ID{Consumer: "c", Message: strings.Repeat("m", 10_000)}, ok, nil, "ID.Message", 512},
		{"long in bytes", inbox.ID{Consumer: "c", Message: strings.Repeat("é", 257)}, ok, nil, "ID.Message", 512},
		{"NUL", inbox.ID{Consumer: "c", Message: "a\x00b"}, ok, nil, "ID.Message", 0},
		{"UTF-8", inbox.ID{Consumer: "c\xff", Message: "m"}, ok, nil, "ID.Consumer", 0},
		{"nil handler", anID, nil, nil, "fn", 0},
		{"empty fingerprint", anID, ok, []byte{}, "Fingerprint", 0},
		{"short fingerprint", anID, ok, []byte{1}, "Fingerprint", 0},
		{"long fingerprint", anID, ok, make([]byte, 65), "Fingerprint", 64},
	} {
		_, err := inbox.Handle(t.Context(), tx, c.id, c.fn, inbox.WithFingerprint(c.print))
		var input *commitbox.InputError
		if !errors.As(err, &input) || inbox.Disposition(err).Verdict != inbox.DeadLetter {
			t.Errorf("%s: %v", c.name, err)
		} else if input.Field != c.field || input.Limit != c.limit {
			t.Errorf("%s: field %q, limit %d; want %q, %d", c.name, input.Field, input.Limit, c.field, c.limit)
		}
	}
	if err := write(t.Context(), tx, anID, "caller"); err != nil {
		t.Fatal(err)
	}
	w.commit(tx)
	w.wantEffects(anID, 1)

	var input *commitbox.InputError
	if _, err := inbox.Handle(t.Context(), tx, anID, ok); !errors.As(err, &input) || input.Field != "tx" || !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("ended transaction: %v", err)
	}
	if _, err := inbox.Handle(t.Context(), nil, anID, ok); !errors.As(err, &input) || input.Field != "tx" {
		t.Errorf("nil transaction: %v", err)
	}
	if _, err := inbox.Process[inbox.Void](t.Context(), nil, inbox.Message{ID: anID}, nil); !errors.As(err, &input) || input.Field != "box" {
		t.Errorf("nil box: %v", err)
	}
}

func TestB33_LongIDsDifferInTheLastByte(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for _, last := range []string{"a", "b"} {
		id := inbox.ID{Consumer: strings.Repeat("c", 200), Message: strings.Repeat("é", 255) + "x" + last}
		if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, effect(id)); err != nil {
			t.Fatal(err)
		}
		w.wantEffects(id, 1)
	}
}

func TestSerializationFailureIsRetryable(t *testing.T) {
	w := newWorld(t)
	tx := w.begin(pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if _, err := tx.Exec(t.Context(), `select count(*) from effect`); err != nil {
		t.Fatal(err)
	}
	if _, err := inbox.Process(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, effect(anID)); err != nil {
		t.Fatal(err)
	}
	_, err := inbox.Handle(t.Context(), tx, anID, func(context.Context) (inbox.Void, error) { return inbox.Void{}, nil })
	var pg *pgconn.PgError
	if !errors.Is(err, inbox.ErrUnavailable) || !errors.As(err, &pg) || pg.Code != "40001" || !inbox.Retryable(err) {
		t.Errorf("got %v", err)
	}
}

// A rollback to a savepoint of the caller's takes the row away, which only a result or a savepoint of Handle shows.
func TestHandlerThatRollsBackTheCallersSavepoint(t *testing.T) {
	w := newWorld(t)
	for name, opts := range map[string][]inbox.Option{"savepoint": nil, "no savepoint": {inbox.NoSavepoint()}} {
		id := inbox.ID{Consumer: "c", Message: name}
		tx := w.begin()
		if _, err := tx.Exec(t.Context(), `savepoint earlier`); err != nil {
			t.Fatal(err)
		}
		_, err := inbox.Handle(t.Context(), tx, id, func(ctx context.Context) (int, error) {
			if _, err := tx.Exec(ctx, `rollback to savepoint earlier`); err != nil {
				return 0, err
			}
			return 1, write(ctx, tx, id, "without a row")
		}, opts...)
		if !errors.Is(err, inbox.ErrFailed) {
			t.Errorf("%s: %v", name, err)
		}
		if err := tx.Commit(t.Context()); !errors.Is(err, pgx.ErrTxCommitRollback) {
			t.Errorf("%s: commit: %v", name, err)
		}
		w.wantEffects(id, 0)
	}
}
