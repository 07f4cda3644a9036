package outbox_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// Relays in processes of their own, which can be killed and stopped. Their broker is a table; what is in it is confirmed.
const (
	childURL     = "COMMITBOX_TEST_RELAY_URL"     // makes this test binary a relay
	childFailing = "COMMITBOX_TEST_RELAY_FAILING" // percentage of messages that are refused
	poison       = "poison"                       // the payload that ends the process that publishes it
	mortal       = "mortal."                      // begins the topics of which a refusal may be for good
)

// What a child has in flight at most.
const childLanes, childBatch = 2, 100

const brokerTable = "create table broker (n bigint generated always as identity primary key, key text not null, payload text not null)"

// child runs a relay until the process ends.
func child(url string) int {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	failing, _ := strconv.Atoi(os.Getenv(childFailing))
	cfg := outbox.RelayConfig{
		Lease: time.Second, BackoffBase: 20 * time.Millisecond, BackoffMax: 100 * time.Millisecond, MaxAttempts: 3, Batch: childBatch, Lanes: childLanes,
		PollMax: 20 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError})),
	}
	if failing > 0 {
		cfg.MaxAttempts = 1000
	}
	relay, err := outbox.NewRelay(pool, tablePublisher{pool, failing}, cfg)
	if err == nil {
		err = relay.Run(ctx)
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

type tablePublisher struct {
	pool    *pgxpool.Pool
	failing int
}

func (p tablePublisher) Publish(ctx context.Context, batch []outbox.Record) []error {
	errs := make([]error, len(batch))
	var queue pgx.Batch
	for i, r := range batch {
		switch {
		case string(r.Payload) == poison:
			os.Exit(3)
		case rand.IntN(100) < p.failing:
			if errs[i] = errRefused; strings.HasPrefix(r.Topic, mortal) && rand.IntN(4) > 0 {
				errs[i] = outbox.Permanent(errRefused)
			}
		default:
			queue.Queue("insert into broker (key, payload) values ($1, $2)", r.Key, string(r.Payload))
		}
	}
	if err := p.pool.SendBatch(ctx, &queue).Close(); err != nil {
		for i := range errs {
			errs[i] = err
		}
	}
	return errs
}

// relayProcess is a child that is started again whenever it has ended.
type relayProcess struct {
	cmd    *exec.Cmd
	ended  chan struct{}
	stderr bytes.Buffer
}

func startProcess(t *testing.T, db *testenv.DB, failing int) *relayProcess {
	t.Helper()
	p := &relayProcess{cmd: exec.Command(os.Args[0]), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), childURL+"="+db.URL, childFailing+"="+strconv.Itoa(failing))
	p.cmd.Stderr = &p.stderr
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

func (p *relayProcess) signal(s syscall.Signal) { _ = p.cmd.Process.Signal(s) }

func (p *relayProcess) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}

func (p *relayProcess) alive() bool {
	select {
	case <-p.ended:
		return false
	default:
		return true
	}
}
