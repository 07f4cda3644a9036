package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/brokers/rabbitmq"
	"github.com/commitbox/commitbox/examples/payment/provider"
	"github.com/commitbox/commitbox/examples/payment/saga"
	"github.com/commitbox/commitbox/examples/payment/shop"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
)

// The components that run in processes of their own.
const (
	providerName  = "provider"
	shopName      = "shop"
	workerName    = "worker"
	completerName = "completer" // a worker without a broker
)

// What a child finds in its environment, beside DATABASE_URL and AMQP_URL.
const (
	envName     = "PAYMENT_NAME" // of the exchange, and the prefix of queues
	envProvider = "PAYMENT_PROVIDER"
	envCrash    = "PAYMENT_CRASH_AT"
	envListen   = "PAYMENT_LISTEN" // where the shop listens; empty: anywhere
)

// child is a component in a process of its own.
type child struct {
	name   string
	cmd    *exec.Cmd
	stdin  io.Closer // the child ends when this closes, so it does not outlive its parent
	gone   chan struct{}
	result error // set before gone is closed

	mu    sync.Mutex
	lines []string
}

// startChild starts this program again.
func startChild(name string, env ...string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{name: name, cmd: exec.Command(self, name), gone: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), env...)
	c.cmd.Stderr = os.Stderr
	if c.stdin, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	stdout, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		defer close(c.gone)
		for scan := bufio.NewScanner(stdout); scan.Scan(); {
			c.mu.Lock()
			c.lines = append(c.lines, scan.Text())
			c.mu.Unlock()
		}
		c.result = c.cmd.Wait()
	}()
	return c, nil
}

// told returns what the child wrote behind the prefix.
func (c *child) told(prefix string) (found []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, line := range c.lines {
		if text, ok := strings.CutPrefix(line, prefix); ok {
			found = append(found, text)
		}
	}
	return found
}

// address waits until the child listens.
func (c *child) address(ctx context.Context) (string, error) {
	for {
		if found := c.told(lineListening); len(found) > 0 {
			return "http://" + found[0], nil
		}
		select {
		case <-ctx.Done():
			return "", context.Cause(ctx)
		case <-c.gone:
			return "", fmt.Errorf("%s ended: %w", c.name, c.result)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// kill ends the child with SIGKILL. An error means that it is gone already.
func (c *child) kill() {
	_ = c.cmd.Process.Signal(syscall.SIGKILL)
	<-c.gone
}

// stop lets the child finish what it holds.
func (c *child) stop() error {
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.gone:
		return c.result
	case <-time.After(30 * time.Second):
		c.kill()
		return fmt.Errorf("%s did not stop and was killed", c.name)
	}
}

// runChild is the other side: one component in this process, until a signal or the end of the parent.
func runChild(ctx context.Context, name string, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	if name == providerName {
		return serve(ctx, &provider.Service{Faults: true, Hang: time.Second}, out)
	}
	crash := &crasher{at: os.Getenv(envCrash), out: out}
	poolConfig, err := pgxpool.ParseConfig(os.Getenv("DATABASE_URL"))
	if err != nil {
		return err
	}
	if name != shopName {
		poolConfig.ConnConfig.Tracer = crash
	}
	pool, err := pgxpool.NewWithConfig(ctx, poolConfig)
	if err != nil {
		return err
	}
	defer pool.Close()
	if name == shopName {
		return runShop(ctx, pool, out)
	}
	return runWorker(ctx, name, pool, crash)
}

// runWorker runs the saga. Its times are short, so that the demonstration does not wait long for the leases of the killed.
func runWorker(ctx context.Context, name string, pool *pgxpool.Pool, crash *crasher) error {
	queues := os.Getenv(envName)
	worker, err := saga.New(pool, saga.Config{
		AMQPURL: os.Getenv("AMQP_URL"), Queue: queues + queueOrders, DeadLetterQueue: queues + queueDead,
		PaymentsURL: os.Getenv(envProvider), Client: &http.Client{Transport: crash, Timeout: 700 * time.Millisecond},
		CompleteEvery: 300 * time.Millisecond, IdleMax: 2 * time.Second,
		Inbox: inbox.Config{LeaseFor: time.Second, BackoffBase: 50 * time.Millisecond, BackoffMax: 500 * time.Millisecond},
	})
	if err != nil {
		return err
	}
	if name == completerName {
		worker.Complete(ctx)
		return nil
	}
	return worker.Run(ctx)
}

// runShop runs the API and the relay that publishes what it writes.
func runShop(ctx context.Context, pool *pgxpool.Pool, out io.Writer) error {
	api, err := shop.New(pool)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	relayed := make(chan error, 1)
	go func() {
		err := keepRelaying(ctx, func(ctx context.Context) error { return relay(ctx, pool) })
		cancel(err) // the one does not go on without the other
		relayed <- err
	}()
	err = serve(ctx, api, out)
	cancel(nil)
	return errors.Join(err, ignoreCanceled(<-relayed))
}

// stallsMax is how often a relay is replaced whose publisher did not come back in time.
const stallsMax = 5

// keepRelaying runs a relay, and another after one that ended with [outbox.ErrPublishStalled]. What a stalled one holds when
// the shop is to stop is taken over when its lease has ended.
func keepRelaying(ctx context.Context, relay func(context.Context) error) error {
	for stalls := 0; ; stalls++ {
		err := relay(ctx)
		switch {
		case !errors.Is(err, outbox.ErrPublishStalled):
			return err
		case ctx.Err() != nil:
			return nil
		case stalls == stallsMax:
			return err
		}
	}
}

// relay publishes until ctx ends. Its publisher is its own: closing that breaks off a call that did not come back.
func relay(ctx context.Context, pool *pgxpool.Pool) error {
	publisher, err := rabbitmq.NewPublisher(rabbitmq.PublisherConfig{URL: os.Getenv("AMQP_URL"), Exchange: os.Getenv(envName)})
	if err != nil {
		return err
	}
	defer publisher.Close(context.WithoutCancel(ctx))
	relay, err := outbox.NewRelay(pool, publisher, outbox.RelayConfig{Lease: 6 * time.Second}) // so that a successor need not wait long
	if err != nil {
		return err
	}
	return relay.Run(ctx)
}

func ignoreCanceled(err error) error {
	if errors.Is(err, context.Canceled) {
		return nil
	}
	return err
}

// serve tells the parent where, and serves until ctx ends.
func serve(ctx context.Context, handler http.Handler, out io.Writer) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", cmp.Or(os.Getenv(envListen), "127.0.0.1:0"))
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadTimeout: 10 * time.Second}
	context.AfterFunc(ctx, func() { _ = server.Close() })
	fmt.Fprintln(out, lineListening+listener.Addr().String())
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}
