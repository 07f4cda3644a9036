package inbox_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/db"
)

// Rules that are about the statements of a lease, played through SQL.

// leaseRow reads the epoch and the token of a lease, to play its holder through SQL.
func (w *world) leaseRow(id inbox.ID) (epoch int64, token pgtype.UUID) {
	w.t.Helper()
	err := w.Pool.QueryRow(context.Background(), `select epoch, lease_token from commitbox.inbox where consumer = $1 and message_id = $2`, id.Consumer, id.Message).Scan(&epoch, &token)
	if err != nil {
		w.t.Fatal(err)
	}
	return epoch, token
}

// A row that an open transaction has locked is skipped by every statement of a lease, not waited for.
func TestF12_NothingWaitsForALockedRow(t *testing.T) {
	w := newWorld(t)
	acquire(t, w.box(inbox.Config{}), anID)
	epoch, token := w.leaseRow(anID)
	w.expire(anID)
	tx := w.begin()
	if _, err := tx.Exec(t.Context(), `select from commitbox.inbox for no key update`); err != nil {
		t.Fatal(err)
	}
	bound, err := w.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = bound.Rollback(context.Background()) }()
	if _, err := bound.Exec(t.Context(), `set local lock_timeout = '30s'`); err != nil {
		t.Fatal(err)
	}
	q, c, m := db.New(bound), anID.Consumer, anID.Message
	renewed, err1 := q.InboxRenew(t.Context(), db.InboxRenewParams{Consumer: c, MessageID: m, Epoch: epoch, Token: token, LeaseSeconds: 1})
	completed, err2 := q.InboxComplete(t.Context(), db.InboxCompleteParams{Consumer: c, MessageID: m, Epoch: epoch, Token: token})
	released, err3 := q.InboxRelease(t.Context(), db.InboxReleaseParams{Consumer: c, MessageID: m, Epoch: epoch, Token: token})
	_, err4 := q.InboxLeaseFail(t.Context(), db.InboxLeaseFailParams{Consumer: c, MessageID: m, Epoch: epoch, Token: token, MaxAttempts: 5})
	_, err5 := q.InboxTakeover(t.Context(), db.InboxTakeoverParams{Consumer: c, MessageID: m, Epoch: epoch, MaxAttempts: 5})
	_, err6 := q.InboxAcquire(t.Context(), db.InboxAcquireParams{Consumer: c, MessageID: m, Token: token, LeaseSeconds: 1, MaxAttempts: 5})
	if err := errors.Join(err1, err2, err3); err != nil || renewed+completed+released != 0 {
		t.Errorf("renewed %d, completed %d, released %d, %v", renewed, completed, released, err)
	}
	for name, err := range map[string]error{"fail": err4, "takeover": err5, "acquire": err6} {
		if !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestF22_SameTokenSameLease(t *testing.T) {
	w := newWorld(t)
	ask := func(token uuid.UUID) (db.InboxAcquireRow, error) {
		return db.New(w.Pool).InboxAcquire(t.Context(), db.InboxAcquireParams{
			Consumer: "c", MessageID: "m", Token: pgtype.UUID{Bytes: token, Valid: true}, LeaseSeconds: 30, MaxAttempts: 1,
		})
	}
	mine := uuid.New()
	for range 2 {
		if row, err := ask(mine); err != nil || row.Epoch != 1 || row.Attempts != 1 {
			t.Errorf("%+v, %v", row, err)
		}
	}
	if _, err := ask(uuid.New()); !errors.Is(err, pgx.ErrNoRows) {
		t.Errorf("another token: %v", err)
	}
}

func TestF23_TakeoverSkipsAnOpenStep(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	acquire(t, box, anID)
	epoch, token := w.leaseRow(anID)
	w.expire(anID)
	tx := w.begin()
	n, err := db.New(tx).InboxStepStore(t.Context(), db.InboxStepStoreParams{Consumer: anID.Consumer, MessageID: anID.Message, Epoch: epoch, Token: token, Name: "charge"})
	if n != 1 || err != nil {
		t.Fatal(n, err)
	}
	if _, err := box.Acquire(t.Context(), inbox.Message{ID: anID}); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("a takeover while a step is being stored: %v", err)
	}
	w.commit(tx)
	next := acquire(t, box, anID)
	if _, err := inbox.Step(t.Context(), next, "charge", func(context.Context) (inbox.Void, error) { t.Error("ran again"); return inbox.Void{}, nil }); err != nil {
		t.Error(err)
	}
	n, err = db.New(w.Pool).InboxStepStore(t.Context(), db.InboxStepStoreParams{Consumer: anID.Consumer, MessageID: anID.Message, Epoch: epoch, Token: token, Name: "ship"})
	if n != 0 || err != nil {
		t.Errorf("a step of the former holder was stored: %d, %v", n, err)
	}
}

func TestF27_RenewalsAndResultsAreHOT(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	acquire(t, box, anID)
	epoch, token := w.leaseRow(anID)
	tx := w.begin()
	for range 20 {
		n, err := db.New(tx).InboxRenew(t.Context(), db.InboxRenewParams{Consumer: anID.Consumer, MessageID: anID.Message, Epoch: epoch, Token: token, LeaseSeconds: 30})
		if n != 1 || err != nil {
			t.Fatal(n, err)
		}
	}
	res, err := inbox.Handle(t.Context(), tx, inbox.ID{Consumer: "c", Message: "m"}, func(context.Context) (int, error) { return 1, nil })
	if err != nil || res.Outcome != inbox.Executed {
		t.Fatal(err)
	}
	var updated, hot int
	err = tx.QueryRow(t.Context(), `select n_tup_upd, n_tup_hot_upd from pg_stat_xact_user_tables where relid = 'commitbox.inbox'::regclass`).Scan(&updated, &hot)
	if err != nil || updated != 21 || hot != updated {
		t.Errorf("%d of %d updates are HOT, %v", hot, updated, err)
	}
}
