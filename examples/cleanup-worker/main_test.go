package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/rights"
	"github.com/commitbox/commitbox/scheduler"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestCleanupWorker(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), testenv.EmptyDatabase(t).URL, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	_, after, _ := strings.Cut(out.String(), "after\n")
	got := regexp.MustCompile(` +`).ReplaceAllString(after, " ")
	const want = ` billing: completed 700
 billing: dead 50
 billing: failed 10
 outbox: dead 5
 outbox: discarded 0
 outbox: not delivered 3
 shipping: completed 1
`
	if got != want {
		t.Errorf("after:\n%s\nthe whole output:\n%s", got, &out)
	}
}

// lines is what an example prints. It calls on once, at the first line that contains at.
type lines struct {
	at string
	on func()

	mu   sync.Mutex
	text bytes.Buffer
	once sync.Once
}

func (l *lines) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte(l.at)) {
		l.once.Do(l.on)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

// A worker that is told to stop ends well, and says how far it was.
func TestP15_TheWorkerStops(t *testing.T) {
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	out := &lines{at: "cleanup: 5000", on: stop}
	if err := run(ctx, testenv.EmptyDatabase(t).URL, out); err != nil {
		t.Error(err)
	}
	if text := out.text.String(); !strings.Contains(text, "stopped: ") || !strings.Contains(text, "after\n  billing: completed     700\n") {
		t.Error(text)
	}
}

// SIGHUP confirms the clock.
func TestTheWorkerConfirmsTheClock(t *testing.T) {
	out := &lines{at: "cleanup: 5000", on: func() {
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			t.Error(err)
		}
	}}
	if err := run(t.Context(), testenv.EmptyDatabase(t).URL, out); err != nil {
		t.Error(err)
	}
	if text := out.text.String(); !strings.Contains(text, "the database's clock was confirmed") {
		t.Error(text)
	}
}

// as returns a pool whose connections have a role of their own with the rights of its works.
func as(t *testing.T, db *testenv.DB, name string, works ...rights.Work) *pgxpool.Pool {
	t.Helper()
	name = strings.Replace(db.Name, "test", name, 1)
	exec := func(sql string, args ...any) {
		t.Helper()
		if _, err := db.Pool.Exec(context.Background(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	exec("create role " + name)
	t.Cleanup(func() {
		exec("drop owned by " + name)
		exec("drop role " + name)
	})
	for _, work := range works {
		exec("select commitbox.grant_rights($1, $2)", string(work), name)
	}
	cfg := db.Pool.Config()
	cfg.ConnConfig.RuntimeParams["role"] = name
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// The worker needs no more than its two roles, and says at start what is missing.
func TestB88_TheWorkerHasTwoRoles(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), rows); err != nil {
		t.Fatal(err)
	}
	cleaner, handler := as(t, db, "cleaner", rights.Cleanup, rights.Schedule), as(t, db, "handler", rights.Consume)
	if _, err := db.Pool.Exec(t.Context(), "grant insert on shipment to "+strings.Replace(db.Name, "test", "handler", 1)); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := until(t.Context(), cleaner, handler, db.Pool, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	var missing *rights.MissingError
	if err := work(t.Context(), handler, cleaner, func(scheduler.CleanupReport) {}); !errors.As(err, &missing) {
		t.Errorf("with the roles exchanged: %v", err)
	}
}
