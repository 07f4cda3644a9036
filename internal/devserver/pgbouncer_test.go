package devserver_test

import (
	"context"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/devserver"
)

// exec mode works without prepared statements.
const execMode = "&default_query_exec_mode=exec"

func TestPgBouncerSharesServerConnections(t *testing.T) {
	t.Parallel()
	postgres := startPostgres(t, devserver.PostgresOptions{})
	s, err := devserver.StartPgBouncer(t.Context(), devserver.PgBouncerOptions{Target: postgres.URL(), PoolSize: 3})
	stopAfter(t, s, err)

	pids := make(map[string]bool)
	var mu sync.Mutex
	var clients sync.WaitGroup
	for range 12 {
		clients.Go(func() {
			pid, err := query(t.Context(), s.URL()+execMode, `SELECT pg_backend_pid()::text FROM pg_sleep(0.05)`)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Error(err)
			}
			pids[pid] = true
		})
	}
	clients.Wait()
	if len(pids) < 2 || len(pids) > 3 {
		t.Errorf("12 clients used %d server connections, want 2 or 3", len(pids))
	}
}

// TestPgBouncerThatEndsByItselfIsStartedAgain lets it end as a fault of its own would, and then by the starter's will.
func TestPgBouncerThatEndsByItselfIsStartedAgain(t *testing.T) {
	t.Parallel()
	postgres := startPostgres(t, devserver.PostgresOptions{})
	s, err := devserver.StartPgBouncer(t.Context(), devserver.PgBouncerOptions{Target: postgres.URL()})
	stopAfter(t, s, err)
	for range 2 {
		pid := s.Pid()
		must(t, syscall.Kill(pid, syscall.SIGKILL))
		deadline := time.Now().Add(30 * time.Second)
		for s.Pid() == pid {
			if time.Now().After(deadline) {
				t.Fatal("it was not started again")
			}
			time.Sleep(10 * time.Millisecond)
		}
		if _, err := query(t.Context(), s.URL()+execMode, `SELECT 'there'`); err != nil {
			t.Fatalf("after it was started again: %v", err)
		}
	}
	must(t, s.Kill())
	time.Sleep(200 * time.Millisecond)
	if _, err := query(t.Context(), s.URL()+execMode, `SELECT 'there'`); err == nil {
		t.Error("it was started again although it was to end")
	}
}

// TestPgBouncerIsInTransactionMode shows that a session's state does not belong
// to the client.
func TestPgBouncerIsInTransactionMode(t *testing.T) {
	t.Parallel()
	postgres := startPostgres(t, devserver.PostgresOptions{})
	s, err := devserver.StartPgBouncer(t.Context(), devserver.PgBouncerOptions{Target: postgres.URL(), PoolSize: 1})
	stopAfter(t, s, err)
	ctx := t.Context()
	var conns [2]*pgx.Conn
	for i := range conns {
		conns[i], err = pgx.Connect(ctx, s.URL()+execMode)
		must(t, err)
		defer conns[i].Close(context.Background())
	}
	_, err = conns[0].Exec(ctx, `SELECT set_config('commitbox.mark', 'first', false)`)
	must(t, err)
	var mark string
	must(t, conns[1].QueryRow(ctx, `SELECT current_setting('commitbox.mark', true)`).Scan(&mark))
	if mark != "first" {
		t.Errorf("the second client sees %q: it has a server connection of its own", mark)
	}
}
