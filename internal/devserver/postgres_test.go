package devserver_test

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/devserver"
)

func startPostgres(t *testing.T, o devserver.PostgresOptions) *devserver.Server {
	t.Helper()
	s, err := devserver.StartPostgres(t.Context(), o)
	return stopAfter(t, s, err)
}

// stopAfter stops the server at the end of the test and looks that nothing of it
// is left.
func stopAfter(t *testing.T, s *devserver.Server, err error) *devserver.Server {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		pid := s.Pid()
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(s.Dir()); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the folder %s is left: %v", s.Dir(), err)
		}
		if processExists(pid) {
			t.Errorf("process %d is left", pid)
		}
	})
	return s
}

// query runs a statement on a new connection and returns the text of its only
// value.
func query(ctx context.Context, url, sql string) (text string, err error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer conn.Close(context.Background())
	err = conn.QueryRow(ctx, sql).Scan(&text)
	return text, err
}

func mustQuery(t *testing.T, url, sql string) string {
	t.Helper()
	text, err := query(t.Context(), url, sql)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return text
}

func mustExec(t *testing.T, url, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func TestPostgresSettings(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		options devserver.PostgresOptions
		want    string
	}{
		{"fast", devserver.PostgresOptions{}, "off/off/off/200"},
		{"durable", devserver.PostgresOptions{Durable: true}, "on/on/on/200"},
		{"own", devserver.PostgresOptions{MaxConnections: 30, Settings: map[string]string{"fsync": "on"}}, "on/off/off/30"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := startPostgres(t, c.options)
			got := mustQuery(t, s.URL(), `SELECT concat_ws('/', current_setting('fsync'), current_setting('full_page_writes'),
				current_setting('synchronous_commit'), current_setting('max_connections'))`)
			if got != c.want {
				t.Errorf("settings are %s, want %s", got, c.want)
			}
		})
	}
}

func TestPostgresListensOnLoopbackOnly(t *testing.T) {
	t.Parallel()
	s := startPostgres(t, devserver.PostgresOptions{})
	if got := mustQuery(t, s.URL(), `SHOW listen_addresses`); got != "127.0.0.1" {
		t.Errorf("listens on %q", got)
	}
}

func TestPostgresKeepsDataOverKillAndRestart(t *testing.T) {
	t.Parallel()
	s := startPostgres(t, devserver.PostgresOptions{Durable: true})
	url := s.URL()
	mustExec(t, url, `CREATE TABLE kept AS SELECT 1 AS a`)

	before := s.Pid()
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if _, err := query(t.Context(), url, `SELECT 'x'`); err == nil {
		t.Fatal("a killed server still answers")
	}
	for range 2 { // after a crash, then out of a running state
		if err := s.Restart(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := mustQuery(t, url, `SELECT count(*)::text FROM kept`); got != "1" {
			t.Fatalf("%s rows are left, want 1", got)
		}
	}
	if s.Pid() == before || s.URL() != url {
		t.Errorf("after the restart: pid %d (before %d), URL %s (before %s)", s.Pid(), before, s.URL(), url)
	}
}

func TestPostgresPauseAndResume(t *testing.T) {
	t.Parallel()
	s := startPostgres(t, devserver.PostgresOptions{})
	conn, err := pgx.Connect(t.Context(), s.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.Background())
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
	answered := make(chan error, 1)
	go func() { answered <- conn.Ping(context.Background()) }()
	select {
	case err := <-answered:
		t.Fatalf("a paused server answered: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	if err := s.Resume(); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err != nil {
		t.Fatalf("after Resume: %v", err)
	}
}

func TestPausedServerCanBeStopped(t *testing.T) {
	t.Parallel()
	s := startPostgres(t, devserver.PostgresOptions{})
	if err := s.Pause(); err != nil {
		t.Fatal(err)
	}
}

func TestStoppedServerRefuses(t *testing.T) {
	t.Parallel()
	s := startPostgres(t, devserver.PostgresOptions{})
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	for name, do := range map[string]func() error{
		"Kill":    s.Kill,
		"Pause":   s.Pause,
		"Resume":  s.Resume,
		"Restart": func() error { return s.Restart(t.Context()) },
	} {
		if do() == nil {
			t.Errorf("%s of a stopped server gives no error", name)
		}
	}
	if err := s.Stop(); err != nil {
		t.Errorf("the second Stop: %v", err)
	}
}

func TestFailedStartSaysWhyAndLeavesNothing(t *testing.T) {
	t.Parallel()
	_, err := devserver.StartPostgres(t.Context(), devserver.PostgresOptions{
		Settings: map[string]string{"no_such_setting": "1"},
	})
	if err == nil {
		t.Fatal("started with an unknown setting")
	}
	if !contains(err, "no_such_setting") {
		t.Errorf("the error does not carry the server's words: %v", err)
	}
}

func TestMissingBinaries(t *testing.T) {
	t.Parallel()
	_, err := devserver.PostgresBinDir(7)
	var missing *devserver.MissingError
	if !errors.As(err, &missing) || missing.Service != "postgres 7" {
		t.Errorf("got %v, want a MissingError for postgres 7", err)
	}
}
