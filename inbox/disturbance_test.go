package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/inbox"
)

// atCommit makes every row of effect whose note is a SQLSTATE raise it when its transaction commits, as often as the
// sequence allows.
func (w *world) atCommit(times int) {
	w.t.Helper()
	w.exec(fmt.Sprintf(`create sequence raised maxvalue %d`, times+1))
	w.exec(`create function raise_at_commit() returns trigger language plpgsql as $$
		begin
			if new.note <> '' and nextval('raised') <= (select seqmax - 1 from pg_sequence where seqrelid = 'raised'::regclass) then
				raise exception 'at commit' using errcode = new.note;
			end if;
			return null;
		end $$`)
	w.exec(`create constraint trigger raise_at_commit after insert on effect deferrable initially deferred for each row execute function raise_at_commit()`)
}

func TestFailureAtCommitIsAFailure(t *testing.T) {
	w := newWorld(t)
	w.atCommit(1000)
	box := w.box(inbox.Config{})
	plain, result, leased := inbox.ID{Consumer: "c", Message: "plain"}, inbox.ID{Consumer: "c", Message: "result"}, inbox.ID{Consumer: "c", Message: "leased"}
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: plain}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, write(ctx, tx, plain, "23505")
	})
	_, err2 := inbox.Process(t.Context(), box, inbox.Message{ID: result}, func(ctx context.Context, tx pgx.Tx) (int, error) {
		return 1, write(ctx, tx, result, "23505")
	})
	for name, err := range map[string]error{"plain": err, "result": err2} {
		var pg *pgconn.PgError
		if !errors.Is(err, inbox.ErrFailed) || !errors.As(err, &pg) || pg.Code != "23505" {
			t.Errorf("%s: %v", name, err)
		}
	}
	lease := acquire(t, box, leased)
	if _, err := inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (int, error) { return 1, write(ctx, tx, leased, "23505") }); err == nil {
		t.Error("leased: no error")
	}
	w.wantRow(leased, "pending", 1)
	for _, id := range []inbox.ID{plain, result} {
		w.wantRow(id, "failed", 1)
		w.wantEffects(id, 0)
	}
}

func TestConflictAtCommitIsRunAgain(t *testing.T) {
	for _, mode := range []string{"process", "batch", "complete in"} {
		t.Run(mode, func(t *testing.T) {
			w := newWorld(t)
			w.atCommit(2)
			box := w.box(inbox.Config{})
			runs := 0
			run := func(ctx context.Context, tx pgx.Tx) (int, error) { runs++; return runs, write(ctx, tx, anID, "40001") }
			var err error
			switch mode {
			case "process":
				_, err = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, run)
			case "batch":
				msgs := []inbox.Message{{ID: anID}, {ID: inbox.ID{Consumer: anID.Consumer, Message: "other"}}}
				for _, a := range inbox.ProcessBatch(t.Context(), box, msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]inbox.Void, error) {
					_, err := run(ctx, tx)
					return nil, err
				}) {
					err = errors.Join(err, a.Err)
				}
			default:
				_, err = inbox.CompleteIn(t.Context(), acquire(t, box, anID), run)
			}
			if err != nil || runs != 3 {
				t.Errorf("%d runs, %v", runs, err)
			}
			w.wantEffects(anID, 1)
		})
	}
}

func TestProcessLeasedReleasesWhatIsNotTheMessagesFault(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 1})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, c := range []struct {
		name string
		end  func() error
	}{
		{"store", func() error { return &pgconn.PgError{Code: "57P01"} }},
		{"cancelled", func() error { cancel(); return ctx.Err() }},
	} {
		id := inbox.ID{Consumer: "c", Message: c.name}
		_, err := inbox.ProcessLeased(ctx, box, inbox.Message{ID: id}, func(context.Context, *inbox.Lease) (int, error) { return 0, c.end() })
		if !errors.Is(err, inbox.ErrUnavailable) || inbox.Disposition(err).Verdict != inbox.Retry {
			t.Errorf("%s: %v", c.name, err)
		}
		w.wantRow(id, "failed", 0)
	}
}

func TestStepWhoseLeaseIsLostMeanwhile(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	lease := acquire(t, box, anID)
	_, err := inbox.Step(t.Context(), lease, "charge", func(context.Context) (int, error) {
		w.expire(anID)
		acquire(t, box, anID)
		return 1, nil
	})
	if !errors.Is(err, inbox.ErrLeaseLost) {
		t.Errorf("got %v", err)
	}
	if n := one[int](w, `select count(*)::int from commitbox.inbox_step`); n != 0 {
		t.Error("the step of the former holder was stored")
	}
	if _, err := inbox.Step[int](t.Context(), lease, "", nil); err == nil {
		t.Error("a step without name and function was taken")
	}
}

func TestOperatorDoesNotWaitForARunningMessage(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{IgnoreDue: true})
	fail := func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, errors.New("x") }
	_, _ = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, fail)
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		if _, err := box.Requeue(t.Context(), anID, ""); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("requeue: %v", err)
		}
		if err := box.Discard(t.Context(), anID, ""); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("discard: %v", err)
		}
		return inbox.Void{}, write(ctx, tx, anID, "")
	})
	if err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
}

func TestHandlerHasAWholeTransaction(t *testing.T) {
	w := newWorld(t)
	_, err := inbox.Process(t.Context(), w.box(inbox.Config{}), inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		n, err := tx.CopyFrom(ctx, pgx.Identifier{"effect"}, []string{"id", "note"}, pgx.CopyFromRows([][]any{{anID.String(), "copied"}}))
		if n != 1 || err != nil {
			t.Errorf("copy: %d, %v", n, err)
		}
		if _, err := tx.Prepare(ctx, "mine", `select 1`); err != nil {
			t.Errorf("prepare: %v", err)
		}
		objects := tx.LargeObjects()
		if _, err := objects.Create(ctx, 0); err != nil {
			t.Errorf("large object: %v", err)
		}
		if tx.Conn() == nil {
			t.Error("no connection")
		}
		return inbox.Void{}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
}

func TestStoreThatIsAway(t *testing.T) {
	w, box, proxy := proxied(t, inbox.Config{})
	lease := acquire(t, box, anID)
	proxy.Refuse(true)
	proxy.Cut()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	_, processErr := inbox.Process(ctx, box, inbox.Message{ID: anID}, effect(anID))
	_, leasedErr := inbox.ProcessLeased(ctx, box, inbox.Message{ID: anID}, func(context.Context, *inbox.Lease) (int, error) { return 0, nil })
	_, completeErr := inbox.Complete(ctx, lease, 1)
	_, inErr := inbox.CompleteIn(ctx, lease, func(context.Context, pgx.Tx) (int, error) { return 1, nil })
	_, _, askErr := inbox.IsCompleted[int](ctx, box, anID)
	_, requeueErr := box.Requeue(ctx, anID, "")
	recordErr := inbox.RecordFailure(ctx, box, inbox.Message{ID: anID}, errors.New("x"))
	batch := inbox.ProcessBatch(ctx, box, messages(2), writeAll)
	for name, err := range map[string]error{
		"process": processErr, "leased": leasedErr, "complete": completeErr, "complete in": inErr, "ask": askErr,
		"requeue": requeueErr, "record": recordErr, "batch": batch[0].Err,
	} {
		if !errors.Is(err, inbox.ErrUnavailable) || inbox.Disposition(err).Verdict != inbox.Retry {
			t.Errorf("%s: %v", name, err)
		}
	}
	proxy.Refuse(false)
	if _, err := inbox.Complete(t.Context(), lease, 1); err != nil {
		t.Errorf("when it is back: %v", err)
	}
	w.wantRow(anID, "completed", 1)
}
