package inbox_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5"

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
