package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// stopTimeout is how long a component may take to finish what it holds.
const stopTimeout = 30 * time.Second

// child is a component in a process of its own.
type child struct {
	cmd    *exec.Cmd
	stdin  io.Closer // the child ends when this closes, so it does not outlive its parent
	gone   chan struct{}
	result error // of the process; set before gone is closed
}

// startChild starts this program again to run one component. The environment tells it which database and broker.
func startChild(name string, env []string, note journal) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{cmd: exec.Command(self, name), gone: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stderr = os.Stderr
	stdin, err := c.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	c.stdin = stdin
	go func() {
		defer close(c.gone)
		for lines := bufio.NewScanner(stdout); lines.Scan(); {
			note(lines.Text())
		}
		c.result = childError(c.cmd.Wait())
	}()
	return c, nil
}

// stalledStatus is the exit status of a relay that ended with [outbox.ErrPublishStalled].
const stalledStatus = 75

// exitStatus is the status with which the program ends.
func exitStatus(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, outbox.ErrPublishStalled):
		return stalledStatus
	default:
		return 1
	}
}

// childError is what a child's exit status says.
func childError(err error) error {
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == stalledStatus {
		return outbox.ErrPublishStalled
	}
	return err
}

func (c *child) kill() {
	// An error means that the process is gone already.
	_ = c.cmd.Process.Signal(syscall.SIGKILL)
	<-c.gone
}

func (c *child) stop() error {
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.gone:
		return c.result
	case <-time.After(stopTimeout):
		c.kill()
		return fmt.Errorf("did not stop within %s and was killed", stopTimeout)
	}
}

func (c *child) wait() error {
	<-c.gone
	return c.result
}

// runChild is the other side: the component called name, in this process, until a signal or the end of the parent.
func runChild(ctx context.Context, name string, stdout io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	b := &rabbit{url: os.Getenv("AMQP_URL"), name: os.Getenv("QUICKSTART_NAME")}
	var mu sync.Mutex
	note := func(line string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintln(stdout, line)
	}
	err = component{name, pool, b, note, slog.Default()}.run(ctx)
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}
