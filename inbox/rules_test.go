package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/schema"
	"github.com/commitbox/commitbox/migrate"
)

// Rules of the protocol that have no test beside the feature that they guard.

func TestF02_OldSnapshotRunsTheHandler(t *testing.T) {
	w := newWorld(t)
	for _, level := range levels[1:] {
		id := inbox.ID{Consumer: "c", Message: string(level)}
		w.exec(`insert into commitbox.inbox (consumer, message_id, status, finished_at) values ($1, $2, 'completed', now())`, id.Consumer, id.Message)
		tx := w.begin(pgx.TxOptions{IsoLevel: level})
		if _, err := tx.Exec(t.Context(), `select from effect`); err != nil {
			t.Fatal(err)
		}
		w.exec(`delete from commitbox.inbox`) // as retention does; tx still sees the row
		res, err := inbox.Handle(t.Context(), tx, id, func(ctx context.Context) (inbox.Void, error) { return inbox.Void{}, write(ctx, tx, id, "") })
		if err != nil || res.Outcome != inbox.Executed {
			t.Errorf("%s: %+v, %v", level, res, err)
			continue
		}
		w.commit(tx)
		w.wantEffects(id, 1)
	}
}

func TestF09_FingerprintsAreComparedWhereBothHaveOne(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	a, b := inbox.FingerprintOf([]byte(`{"x":1,"y":2}`)), inbox.FingerprintOf([]byte(`{"y":2,"x":1}`))
	for i, c := range []struct {
		stored, given []byte
		mismatch      bool
	}{
		{a, a, false}, {a, b, true}, {a, nil, false}, {nil, b, false}, {a, []byte{2, 1}, false},
	} {
		id := inbox.ID{Consumer: "c", Message: fmt.Sprint(i)}
		fail := func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, errors.New("x") }
		if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: id, Fingerprint: c.stored}, fail); !errors.Is(err, inbox.ErrFailed) {
			t.Fatal(err)
		}
		w.makeDue(id)
		lease, err := box.Acquire(t.Context(), inbox.Message{ID: id, Fingerprint: c.given})
		if got := errors.Is(err, inbox.ErrPayloadMismatch); got != c.mismatch {
			t.Errorf("%d: lease: %v", i, err)
		}
		if err == nil {
			_ = lease.Release(t.Context())
		}
		_, err = inbox.Process(t.Context(), box, inbox.Message{ID: id, Fingerprint: c.given}, effect(id))
		if got := errors.Is(err, inbox.ErrPayloadMismatch); got != c.mismatch {
			t.Errorf("%d: process: %v", i, err)
		}
	}
}

func TestF13_EveryClaimTakesTheSameLock(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		others, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		_, acquireErr := box.Acquire(others, inbox.Message{ID: anID})
		batch := inbox.ProcessBatch(others, box, []inbox.Message{{ID: anID}, {ID: inbox.ID{Consumer: anID.Consumer, Message: "free"}}}, writeAll)
		markErr := pgx.BeginFunc(others, w.Pool, func(tx pgx.Tx) error { return inbox.MarkCompleted(others, tx, anID, 1, "") })
		for name, err := range map[string]error{"acquire": acquireErr, "batch": batch[0].Err, "mark": markErr} {
			if !errors.Is(err, inbox.ErrInProgress) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if batch[1].Err != nil {
			t.Errorf("the free one: %v", batch[1].Err)
		}
		return inbox.Void{}, write(ctx, tx, anID, "")
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Who holds the lock may be about to change the row that it has not locked yet.
func TestF13_NoLeaseIsTakenUnderAnothersLock(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	w.exec(`insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until)
		values ($1, $2, 'pending', 1, 1, gen_random_uuid(), now() - interval '1 minute')`, anID.Consumer, anID.Message)
	tx := w.begin()
	if _, err := tx.Exec(t.Context(), `select pg_advisory_xact_lock(commitbox.inbox_lock($1, $2))`, anID.Consumer, anID.Message); err != nil {
		t.Fatal(err)
	}
	if _, err := box.Acquire(t.Context(), inbox.Message{ID: anID}); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("under another's lock: %v", err)
	}
	w.wantRow(anID, "pending", 1)
	w.commit(tx)
	lease, err := box.Acquire(t.Context(), inbox.Message{ID: anID})
	if err != nil {
		t.Fatalf("once it is free: %v", err)
	}
	if err := lease.Release(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestF14_ClaimRacesWithRemoval(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				w.exec(`delete from commitbox.inbox where status = 'completed'`)
			}
		}
	})
	for i := range 300 {
		res, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (int, error) { return 1, nil })
		if err != nil && !errors.Is(err, inbox.ErrInProgress) || err == nil && res.Value != 1 {
			t.Errorf("%d: %+v, %v", i, res, err)
		}
	}
	close(stop)
	wg.Wait()
}

func TestF16_UnrelatedMessagesDoNotCollide(t *testing.T) {
	w := newWorld(t)
	var wg sync.WaitGroup
	for worker := range 8 {
		wg.Go(func() {
			for i := range 20 {
				id := inbox.ID{Consumer: "c", Message: fmt.Sprintf("%d-%d", worker, i)}
				err := pgx.BeginTxFunc(t.Context(), w.Pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
					_, err := inbox.Handle(t.Context(), tx, id, func(context.Context) (inbox.Void, error) { return inbox.Void{}, nil })
					return err
				})
				if err != nil {
					t.Errorf("%s: %v", id, err)
				}
			}
		})
	}
	wg.Wait()
}

func TestF16_StricterDefaultLevel(t *testing.T) {
	w := newWorld(t)
	cfg := w.Pool.Config()
	cfg.ConnConfig.RuntimeParams["default_transaction_isolation"] = "repeatable read"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	w.Pool = pool
	box := w.box(inbox.Config{})
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (string, error) {
		var level string
		err := tx.QueryRow(ctx, `show transaction_isolation`).Scan(&level)
		if level != "read committed" {
			t.Errorf("the handler runs at %s", level)
		}
		return level, errors.Join(err, errors.New("fail"))
	}); !errors.Is(err, inbox.ErrFailed) {
		t.Fatal(err)
	}
	w.wantRow(anID, "failed", 1)
}

func TestF17_DeliveryIsTheSecondLimit(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 2, MaxDeliveries: 5})
	msg := inbox.Message{ID: anID, Payload: []byte("p"), Delivery: 6}
	ctx, cancel := context.WithCancel(t.Context())
	_, err := inbox.Process(ctx, box, msg, func(ctx context.Context, _ pgx.Tx) (inbox.Void, error) {
		cancel() // a run that leaves no recorded end, as that of a process that dies
		return inbox.Void{}, ctx.Err()
	})
	if !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("the run: %v", err)
	}
	w.wantRow(anID, "failed", 0)
	if _, err := inbox.Process(t.Context(), box, msg, effect(anID)); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("a copy right after the row was left: %v", err)
	}
	w.exec(`update commitbox.inbox set next_attempt_at = next_attempt_at - interval '3 seconds'`)
	_, err = inbox.Process(t.Context(), box, msg, effect(anID))
	var e *inbox.Error
	if !errors.Is(err, inbox.ErrDead) || !errors.As(err, &e) || !e.PayloadKept {
		t.Errorf("got %v", err)
	}
	w.wantEffects(anID, 0)
	w.wantRow(anID, "dead", 1)

	done := inbox.ID{Consumer: "c", Message: "done"}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: done, Delivery: 5}, effect(done)); err != nil {
		t.Fatal(err)
	}
	if res, err := inbox.Process(t.Context(), box, inbox.Message{ID: done, Delivery: 99}, effect(done)); err != nil || !res.Replayed {
		t.Errorf("a completed one is replayed, however often it comes: %+v, %v", res, err)
	}
}

func TestF17_AnOverdeliveredMessageRunsOnce(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 1, MaxDeliveries: 5})
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID, Delivery: 99}, effect(anID)); err != nil {
		t.Errorf("it was delivered during an outage and never ran: %v", err)
	}
	w.wantEffects(anID, 1)
	w.wantRow(anID, "completed", 1)

	fails := inbox.ID{Consumer: "c", Message: "fails"}
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: fails, Delivery: 99}, func(context.Context, pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, errors.New("boom")
	})
	if !errors.Is(err, inbox.ErrDead) {
		t.Errorf("got %v", err)
	}
	w.wantRow(fails, "dead", 1)

	msgs := messages(3)
	msgs[1].Delivery = 99
	for i, a := range inbox.ProcessBatch(t.Context(), box, msgs, writeAll) {
		if a.Err != nil {
			t.Errorf("%d of a batch: %v", i, a.Err)
		}
		w.wantEffects(msgs[i].ID, 1)
	}

	rerun, runs := inbox.ID{Consumer: "c", Message: "rerun"}, 0
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: rerun, Delivery: 99}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		if runs++; runs == 1 {
			_, err := tx.Exec(ctx, `do $$ begin raise exception 'x' using errcode = '40001'; end $$`)
			return inbox.Void{}, err
		}
		return inbox.Void{}, write(ctx, tx, rerun, "")
	}); err != nil {
		t.Errorf("after a serialization failure: %v", err)
	}
	w.wantEffects(rerun, 1)
}

func TestF17_TheStoreCostsNoAttempt(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for _, code := range []string{"08006", "53300", "57P01", "25006"} {
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			_, err := tx.Exec(ctx, fmt.Sprintf(`do $$ begin raise exception 'x' using errcode = '%s'; end $$`, code))
			return inbox.Void{}, err
		})
		if !errors.Is(err, inbox.ErrUnavailable) || inbox.Disposition(err).Verdict != inbox.Retry {
			t.Errorf("%s: %v", code, err)
		}
		w.wantRow(anID, "", 0)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, err := inbox.Process(ctx, box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		cancel()
		return inbox.Void{}, ctx.Err()
	})
	if !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("cancelled: %v", err)
	}
	w.wantRow(anID, "", 0)
}

func TestF18_RecordWaitsForARunningCopyWithABound(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		err := inbox.RecordFailure(context.Background(), box, inbox.Message{ID: anID}, errors.New("a copy's failure"))
		if !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("got %v", err)
		}
		return inbox.Void{}, write(ctx, tx, anID, "")
	})
	if err != nil {
		t.Fatal(err)
	}
	w.wantRow(anID, "completed", 1)
}

func TestLoweredLimitBuriesAtTheNextDelivery(t *testing.T) {
	for _, mode := range []string{"process", "handle", "lease"} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t)
			w.exec(`insert into commitbox.inbox (consumer, message_id, status, attempts, next_attempt_at) values ($1, $2, 'failed', 5, now())`, anID.Consumer, anID.Message)
			box := w.box(inbox.Config{MaxAttempts: 3})
			var err error
			switch mode {
			case "process":
				_, err = inbox.Process(t.Context(), box, inbox.Message{ID: anID, Payload: []byte("p")}, effect(anID))
			case "handle":
				tx := w.begin()
				_, err = inbox.Handle(t.Context(), tx, anID, func(context.Context) (inbox.Void, error) { t.Error("ran"); return inbox.Void{}, nil }, inbox.Using(box))
				w.commit(tx)
			default:
				_, err = box.Acquire(t.Context(), inbox.Message{ID: anID})
			}
			if !errors.Is(err, inbox.ErrDead) {
				t.Errorf("got %v", err)
			}
			w.wantRow(anID, "dead", 5)
		})
	}
}

func TestF19_OnlyEndedRowsAge(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for i, end := range []error{nil, errors.New("x"), inbox.Permanent(errors.New("x"))} {
		_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: inbox.ID{Consumer: "c", Message: fmt.Sprint(i)}}, func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, end })
	}
	acquire(t, box, inbox.ID{Consumer: "c", Message: "leased"})
	ended := one[[]string](w, `select array_agg(status::text order by status) from commitbox.inbox where finished_at is not null`)
	if !slices.Equal(ended, []string{"completed", "dead"}) {
		t.Errorf("%v have an end", ended)
	}
	if _, err := w.Pool.Exec(t.Context(), `update commitbox.inbox set finished_at = now() where status = 'failed'`); err == nil {
		t.Error("a failed row was given an end")
	}
}

func TestF26_LockKeysAndCollation(t *testing.T) {
	w := newWorld(t)
	if err := migrate.Up(t.Context(), w.Pool, migrate.Config{Schema: "other"}); err != nil {
		t.Fatal(err)
	}
	if n := one[int](w, `select count(distinct key)::int from (values (commitbox.inbox_lock('a', 'bc')), (commitbox.inbox_lock('ab', 'c')),
		(other.inbox_lock('a', 'bc')), (commitbox.inbox_lock('bc', 'a'))) as k (key)`); n != 4 {
		t.Errorf("%d different locks, want 4", n)
	}
	if n := one[int](w, `select count(*)::int from information_schema.columns where table_schema = 'commitbox' and table_name like 'inbox%'
		and column_name in ('consumer', 'message_id') and collation_name is distinct from 'C'`); n != 0 {
		t.Errorf("%d key columns are not compared byte by byte", n)
	}
	// The same id in two schemas runs in both.
	other := w.box(inbox.Config{Schema: "other"})
	_, err := inbox.Process(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		_, err := inbox.Process(context.Background(), other, inbox.Message{ID: anID}, effect(anID))
		return inbox.Void{}, errors.Join(err, write(ctx, tx, anID, ""))
	})
	if err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 2)
}

func TestF30_ReplayIntoAnotherType(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil {
		t.Fatal(err)
	}
	res, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (int, error) { return 1, nil })
	if !errors.Is(err, inbox.ErrNoResult) || !res.Replayed || inbox.Disposition(err).Verdict != inbox.Ack || inbox.Retryable(err) {
		t.Errorf("%+v, %v", res, err)
	}
}

func TestF30_UnencodableResultIsAFailure(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{ResultMax: 10})
	for i, value := range []any{make(chan int), "longer than ten bytes"} {
		id := inbox.ID{Consumer: "c", Message: fmt.Sprint(i)}
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (any, error) { return value, write(ctx, tx, id, "") })
		if !errors.Is(err, inbox.ErrFailed) {
			t.Errorf("%d: %v", i, err)
		}
		w.wantEffects(id, 0)
		w.wantRow(id, "failed", 1)
	}
}

func TestF31_HandlersWithTheirOwnHandle(t *testing.T) {
	w := newWorld(t)
	tx := w.begin() // as an ORM would: the handler never sees what Handle was given
	session := schema.Executor(tx)
	_, err := inbox.Handle(t.Context(), tx, anID, func(ctx context.Context) (inbox.Void, error) {
		_, err := session.Exec(ctx, `insert into effect values ($1, '')`, anID.String())
		return inbox.Void{}, errors.Join(err, errors.New("x"))
	})
	if !errors.Is(err, inbox.ErrFailed) {
		t.Fatal(err)
	}
	w.commit(tx)
	w.wantEffects(anID, 0)
}

type shaped struct {
	Kept    int
	Dropped int `json:"-"`
}

func TestF30_FirstAnswerHasTheShapeOfTheReplay(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	value := shaped{Kept: 1, Dropped: 2}
	lease := acquire(t, box, inbox.ID{Consumer: "lease", Message: "m"})
	step, stepErr := inbox.Step(t.Context(), lease, "s", func(context.Context) (shaped, error) { return value, nil })
	completed, completeErr := inbox.Complete(t.Context(), lease, value)
	tx := w.begin()
	handled, handleErr := inbox.Handle(t.Context(), tx, inbox.ID{Consumer: "handle", Message: "m"}, func(context.Context) (shaped, error) { return value, nil })
	w.commit(tx)
	batch := inbox.ProcessBatch(t.Context(), box, messages(2), func(context.Context, pgx.Tx, []inbox.Message) ([]shaped, error) { return []shaped{value, value}, nil })
	run := func() (inbox.Result[shaped], error) {
		return inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(context.Context, pgx.Tx) (shaped, error) { return value, nil })
	}
	first, firstErr := run()
	replay, replayErr := run()
	if err := errors.Join(stepErr, completeErr, handleErr, batch[0].Err, firstErr, replayErr); err != nil {
		t.Fatal(err)
	}
	for name, got := range map[string]shaped{
		"step": step, "complete": completed, "handle": handled.Value, "batch": batch[1].Value, "first": first.Value, "replay": replay.Value,
	} {
		if got != (shaped{Kept: 1}) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}
