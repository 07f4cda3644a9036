package scheduler_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
)

const (
	childMode = "COMMITBOX_TEST_SCHEDULER_CHILD" // makes this test binary one of children
	childURL  = "COMMITBOX_TEST_SCHEDULER_URL"   // the database of a child
)

// children are programs that tests run in processes of their own, to kill them.
var children = map[string]func(ctx context.Context, pool *pgxpool.Pool) error{}

func TestMain(m *testing.M) {
	if mode := os.Getenv(childMode); mode != "" {
		fmt.Fprintln(os.Stderr, runChild(mode))
		os.Exit(1)
	}
	testenv.Main(m)
}

func runChild(mode string) error {
	pool, err := pgxpool.New(context.Background(), os.Getenv(childURL))
	if err != nil {
		return err
	}
	return children[mode](context.Background(), pool)
}

// startChild runs one of children; the returned function kills it and waits for its end.
func startChild(t *testing.T, mode string, db *testenv.DB) (kill func()) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childMode+"="+mode, childURL+"="+db.URL)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	kill = func() {
		_ = cmd.Process.Kill()
		<-ended
	}
	t.Cleanup(kill)
	return kill
}
