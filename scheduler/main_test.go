package scheduler_test

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strconv"
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
	waitTogether()
	testenv.Main(m)
}

// waitTogether lets more tests run at once than there are cores, because most of them wait for time to pass.
func waitTogether() {
	flag.Parse()
	asked := false
	flag.Visit(func(f *flag.Flag) { asked = asked || f.Name == "test.parallel" })
	if !asked {
		_ = flag.Set("test.parallel", strconv.Itoa(2*runtime.GOMAXPROCS(0)))
	}
}

func runChild(mode string) error {
	pool, err := pgxpool.New(context.Background(), os.Getenv(childURL))
	if err != nil {
		return err
	}
	return children[mode](context.Background(), pool)
}

// process is a child that runs.
type process struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

func (p process) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

// kill returns when the process has ended.
func (p process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

// startChild runs one of children until the test ends.
func startChild(t *testing.T, mode string, db *testenv.DB) process {
	t.Helper()
	p := process{exec.Command(os.Args[0]), make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childMode+"="+mode, childURL+"="+db.URL)
	p.cmd.Stderr = os.Stderr
	p.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(p.kill)
	return p
}
