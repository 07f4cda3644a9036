package inbox_test

import (
	"errors"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// The guards of the statements themselves: what is decided in Go may be stale when they run.

const failedRow = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, next_attempt_at)
	values ('c', 'm', 'failed', 2, 7, now() + $1::float8 * interval '1 hour')`

func queries(t *testing.T, on db.DBTX) *db.Queries {
	t.Helper()
	name, err := schema.Parse("")
	if err != nil {
		t.Fatal(err)
	}
	return db.New(name.On(on))
}

const (
	lockRow     = `select 1 from commitbox.inbox for no key update`
	lockMessage = `select pg_advisory_xact_lock(commitbox.inbox_lock('c', 'm'))`
)

func TestTakeoverIsGuarded(t *testing.T) {
	w := newWorld(t)
	good := db.InboxTakeoverParams{Consumer: "c", MessageID: "m", Epoch: 7, MaxAttempts: 3}
	for _, c := range []struct {
		name   string
		due    float64 // hours from now
		change func(*db.InboxTakeoverParams)
		before string // run first, and committed
		holder string // run in another transaction, which stays open
		taken  bool
	}{
		{name: "due", due: -1, taken: true},
		{name: "not due", due: 1},
		{name: "not due, ignored", due: 1, change: func(p *db.InboxTakeoverParams) { p.IgnoreDue = true }, taken: true},
		{name: "another epoch", due: -1, change: func(p *db.InboxTakeoverParams) { p.Epoch = 6 }},
		{name: "attempts used up", due: -1, change: func(p *db.InboxTakeoverParams) { p.MaxAttempts = 2 }},
		{name: "stored steps", due: -1, before: `insert into commitbox.inbox_step values ('c', 'm', 's', 7)`},
		{name: "dead", due: -1, before: `update commitbox.inbox set status = 'dead', next_attempt_at = null, finished_at = now()`},
		{name: "leased", due: -1, before: `update commitbox.inbox set status = 'pending', next_attempt_at = null, lease_token = gen_random_uuid(), lease_until = now() + interval '1 hour'`},
		{name: "lease expired", due: -1, before: `update commitbox.inbox set status = 'pending', next_attempt_at = null, lease_token = gen_random_uuid(), lease_until = now() - interval '1 hour'`, taken: true},
		{name: "row locked", due: -1, holder: lockRow},
		{name: "message locked", due: -1, holder: lockMessage},
	} {
		w.exec(`delete from commitbox.inbox`)
		w.exec(failedRow, c.due)
		w.exec(c.before)
		holder := w.begin()
		if _, err := holder.Exec(t.Context(), c.holder); err != nil {
			t.Fatal(err)
		}
		p := good
		if c.change != nil {
			c.change(&p)
		}
		row, err := queries(t, w.Pool).InboxTakeover(t.Context(), p)
		if !c.taken && !errors.Is(err, pgx.ErrNoRows) {
			t.Errorf("%s: %+v, %v", c.name, row, err)
		}
		if c.taken && (err != nil || row != (db.InboxTakeoverRow{Attempts: 3, Epoch: 8})) {
			t.Errorf("%s: %+v, %v", c.name, row, err)
		}
		if err := holder.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBuryIsGuarded(t *testing.T) {
	w := newWorld(t)
	good := db.InboxBuryParams{Consumer: "c", MessageID: "m", Epoch: 7, MaxAttempts: 2}
	for _, c := range []struct {
		name   string
		change func(*db.InboxBuryParams)
		before string
		holder string
		buried bool
	}{
		{name: "used up", buried: true},
		{name: "another epoch", change: func(p *db.InboxBuryParams) { p.Epoch = 6 }},
		{name: "attempts left", change: func(p *db.InboxBuryParams) { p.MaxAttempts = 3 }},
		{name: "completed", before: `update commitbox.inbox set status = 'completed', next_attempt_at = null, finished_at = now()`},
		{name: "row locked", holder: lockRow},
	} {
		w.exec(`delete from commitbox.inbox`)
		w.exec(failedRow, 1)
		w.exec(c.before)
		holder := w.begin()
		if _, err := holder.Exec(t.Context(), c.holder); err != nil {
			t.Fatal(err)
		}
		p := good
		if c.change != nil {
			c.change(&p)
		}
		row, err := queries(t, w.Pool).InboxBury(t.Context(), p)
		if !c.buried && !errors.Is(err, pgx.ErrNoRows) || c.buried && (err != nil || row.Status != "dead") {
			t.Errorf("%s: %+v, %v", c.name, row, err)
		}
		if err := holder.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// Every write-back of a lease names its epoch and its token; each of them alone keeps a former holder out.
func TestLeaseWritesAreGuarded(t *testing.T) {
	w := newWorld(t)
	q := queries(t, w.Pool)
	const row = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until)
		values ('c', 'm', 'pending', 2, 7, $1, now() + interval '1 hour')`
	mine := pgtype.UUID{Bytes: uuid.New(), Valid: true}
	writes := map[string]func(epoch int64, token pgtype.UUID) (int64, error){
		"renew": func(epoch int64, token pgtype.UUID) (int64, error) {
			return q.InboxRenew(t.Context(), db.InboxRenewParams{Consumer: "c", MessageID: "m", Epoch: epoch, Token: token, LeaseSeconds: 1})
		},
		"complete": func(epoch int64, token pgtype.UUID) (int64, error) {
			return q.InboxComplete(t.Context(), db.InboxCompleteParams{Consumer: "c", MessageID: "m", Epoch: epoch, Token: token})
		},
		"fail": func(epoch int64, token pgtype.UUID) (int64, error) {
			_, err := q.InboxLeaseFail(t.Context(), db.InboxLeaseFailParams{Consumer: "c", MessageID: "m", Epoch: epoch, Token: token, MaxAttempts: 3})
			return found(err)
		},
		"release": func(epoch int64, token pgtype.UUID) (int64, error) {
			return q.InboxRelease(t.Context(), db.InboxReleaseParams{Consumer: "c", MessageID: "m", Epoch: epoch, Token: token})
		},
		"look for a step": func(epoch int64, token pgtype.UUID) (int64, error) {
			_, err := q.InboxStepLook(t.Context(), db.InboxStepLookParams{Consumer: "c", MessageID: "m", Epoch: epoch, Token: token, Name: "s"})
			return found(err)
		},
		"store a step": func(epoch int64, token pgtype.UUID) (int64, error) {
			return q.InboxStepStore(t.Context(), db.InboxStepStoreParams{Consumer: "c", MessageID: "m", Epoch: epoch, Token: token, Name: "s"})
		},
	}
	for name, write := range writes {
		for _, c := range []struct {
			of    string
			epoch int64
			token pgtype.UUID
			want  int64
		}{
			{"the holder", 7, mine, 1},
			{"another epoch", 6, mine, 0},
			{"another token", 7, pgtype.UUID{Bytes: uuid.New(), Valid: true}, 0},
		} {
			w.exec(`delete from commitbox.inbox`)
			w.exec(row, mine)
			if n, err := write(c.epoch, c.token); err != nil || n != c.want {
				t.Errorf("%s by %s: %d rows, %v", name, c.of, n, err)
			}
		}
		w.exec(`delete from commitbox.inbox`)
		w.exec(`insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, finished_at) values ('c', 'm', 'completed', 2, 7, now())`)
		if n, err := write(7, mine); err != nil || n != 0 {
			t.Errorf("%s after the end: %d rows, %v", name, n, err)
		}
	}
}

func found(err error) (int64, error) {
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, nil
	}
	return 1, err
}
