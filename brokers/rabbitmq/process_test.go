package rabbitmq

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// What a child process is told: this test program runs a consumer instead of the tests.
const (
	childQueue    = "COMMITBOX_TEST_CHILD_QUEUE"
	childBroker   = "COMMITBOX_TEST_CHILD_BROKER"
	childDatabase = "COMMITBOX_TEST_CHILD_DATABASE"
	childPause    = "COMMITBOX_TEST_CHILD_PAUSE" // how long a handler takes
	childWorkers  = 5
)

// runChild consumes until SIGTERM. It writes a line when a handler begins, and dies when its parent does: then its
// standard input ends.
func runChild() int {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(2)
	}()
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer cancel()
	if err := consumeInChild(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func consumeInChild(ctx context.Context) error {
	pause, err := time.ParseDuration(os.Getenv(childPause))
	if err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(os.Getenv(childDatabase))
	if err != nil {
		return err
	}
	config.MaxConns = 2 * childWorkers // every handler holds one
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	box, err := inbox.New(pool, inbox.Config{})
	if err != nil {
		return err
	}
	c, err := NewConsumer(box, ConsumerConfig{
		URL: os.Getenv(childBroker), Queue: os.Getenv(childQueue), DeadLetterByBroker: true, Workers: childWorkers,
	}, func(ctx context.Context, tx pgx.Tx, d Delivery) error {
		_, err := tx.Exec(ctx, `INSERT INTO effect (message) VALUES ($1)`, d.ID.Message)
		fmt.Println("entered")
		time.Sleep(pause)
		return err
	})
	if err != nil {
		return err
	}
	return c.Run(ctx)
}

// child is a consumer in a process of its own.
type child struct {
	t     testing.TB
	cmd   *exec.Cmd
	lines *bufio.Reader
}

func startChild(t testing.TB, url, queue string, pool *pgxpool.Pool, pause time.Duration) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childQueue+"="+queue, childBroker+"="+url,
		childDatabase+"="+pool.Config().ConnString(), childPause+"="+pause.String())
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cmd.StdinPipe(); err != nil { // open until the child is waited for
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() }) // mostly gone by then
	return &child{t: t, cmd: cmd, lines: bufio.NewReader(out)}
}

// waitBusy returns when all workers are in their handlers.
func (c *child) waitBusy() {
	c.t.Helper()
	tooLate := time.AfterFunc(patience, func() { _ = c.cmd.Process.Kill() }) // ends the reading
	defer tooLate.Stop()
	for range childWorkers {
		if line, err := c.lines.ReadString('\n'); err != nil || line != "entered\n" {
			c.t.Fatalf("the child wrote %q, %v", line, err)
		}
	}
}

// end sends a signal and waits for the end of the process.
func (c *child) end(sig os.Signal) error {
	c.t.Helper()
	if err := c.cmd.Process.Signal(sig); err != nil {
		c.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() {
		_, _ = io.Copy(io.Discard, c.lines)
		done <- c.cmd.Wait()
	}()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		c.t.Fatal("the child does not end")
		return nil
	}
}

func TestA9_ConsumerKilled(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	batch := records(queue, 20)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), batch...)
	first := startChild(t, url, queue, s.pool, time.Hour)
	first.waitBusy()
	if err := first.end(syscall.SIGKILL); err == nil {
		t.Error("the child ended in order")
	}
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue}, s.record)
	eventually(t, "all effects", func() bool { return s.settlements()[settledAck] == len(batch) })
	mustStop(t, stop)
	s.wantEffects(batch)
	if n := b.depth(queue); n != 0 {
		t.Errorf("%d messages are left", n)
	}
}

func TestB78_TerminatedConsumerFinishesItsWork(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue := b.queue(nil)
	batch := records(queue, 20)
	mustPublish(t, openPublisher(t, PublisherConfig{URL: url}), batch...)
	first := startChild(t, url, queue, s.pool, 300*time.Millisecond)
	first.waitBusy()
	if err := first.end(syscall.SIGTERM); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	handled := s.effects()
	if left := b.depth(queue); handled < childWorkers || handled+left != len(batch) {
		t.Errorf("%d handled, %d in the queue, %d sent", handled, left, len(batch))
	}
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue}, s.record)
	eventually(t, "all effects", func() bool { return s.settlements()[settledAck] == len(batch)-handled })
	mustStop(t, stop)
	s.wantEffects(batch)
	if n := s.settlements()[settledRetry]; n != 0 {
		t.Errorf("%d messages were found claimed", n)
	}
}
