package bench

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

const (
	childURL = "BENCH_RELAY_URL" // makes this test binary a relay
	lanes    = 2
	lot      = 100 // batch of the relays
)

// failover is how both relays are set. A call of Publish takes 10 ms, so that some are under way at the kill.
func failover() outbox.RelayConfig {
	return outbox.RelayConfig{Lanes: lanes, Batch: lot, Lease: sized(2*time.Second, 5*time.Second, 15*time.Second)}
}

// witness is a publisher that remembers what it has sent.
type witness struct {
	mu   sync.Mutex
	sent map[uuid.UUID]bool
	tell io.Writer // not nil: gets the ids of a call as soon as they are sent
}

func (w *witness) Publish(_ context.Context, batch []outbox.Record) []error {
	w.mu.Lock()
	var lines []byte
	for _, r := range batch {
		w.sent[r.ID] = true
		lines = append(lines, r.ID.String()+"\n"...)
	}
	if w.tell != nil {
		_, _ = w.tell.Write(lines) // who listens has gone: so does this process
	}
	w.mu.Unlock()
	time.Sleep(10 * time.Millisecond)
	return make([]error, len(batch))
}

// has says whether all ids were sent.
func (w *witness) has(ids []uuid.UUID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		if !w.sent[id] {
			return false
		}
	}
	return true
}

// relayInChild is the process that is killed. It ends when its parent has gone.
func relayInChild(url string) {
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(1)
	}()
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err == nil {
		var relay *outbox.Relay
		relay, err = outbox.NewRelay(pool, &witness{sent: map[uuid.UUID]bool{}, tell: os.Stdout}, failover())
		if err == nil {
			err = relay.Run(ctx)
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// BenchmarkOutboxFailover kills one of two relays in the middle of its work.
func BenchmarkOutboxFailover(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 4)
	survivor := &witness{sent: map[uuid.UUID]bool{}}
	stop := startRelay(b, pool, survivor, failover())
	child := startChild(b, db.url)
	balanced(b, pool, 2)
	const n = 30_000
	run(b, pool, insertMessages, n, payload)
	child.waitFor(b, n/10)
	sent := child.kill(b)
	killed := time.Now()
	heads := waitingHeads(b, pool, sent)
	for !survivor.has(heads) {
		if time.Since(killed) > time.Minute+failover().Lease {
			b.Fatalf("the killed relay's shards are not served; %d messages wait", count(b, pool, "select count(*) from commitbox.outbox_message"))
		}
		time.Sleep(5 * time.Millisecond)
	}
	served := time.Since(killed)
	emptied(b, pool)
	stop()
	copies, lost := compare(sent, survivor.sent, n)
	if lost != 0 {
		b.Fatalf("%d messages were never published", lost)
	}
	r := newReport(b, db, "Outbox: failover after kill -9",
		fmt.Sprintf("%d messages, 2 relays in 2 processes, lease %v, %d lanes, batches of %d, 10 ms per call, payload %d bytes",
			n, failover().Lease, lanes, lot, payloadLen),
		"served again: from the kill until the first message of every shard that the killed relay has not sent is published")
	r.atMost("served again minus lease s", (served - failover().Lease).Seconds(), 2)
	r.atMost("copies", float64(copies), lanes*lot)
	r.print()
}

// compare counts the messages that both have sent, and those of n that nobody has.
func compare(one, other map[uuid.UUID]bool, n int) (copies, lost int) {
	for id := range one {
		if other[id] {
			copies++
		}
	}
	return copies, n - (len(one) + len(other) - copies)
}

// waitingHeads returns the first message of each shard that the killed relay has not sent. Those that it has sent may
// still be deleted by its last statement.
func waitingHeads(b *testing.B, pool *pgxpool.Pool, sent map[uuid.UUID]bool) []uuid.UUID {
	b.Helper()
	const first = `select distinct on (shard) message_id from commitbox.outbox_message
		where message_id <> all($1::uuid[]) order by shard, id`
	rows, err := pool.Query(b.Context(), first, slices.Collect(maps.Keys(sent)))
	if err != nil {
		b.Fatal(err)
	}
	heads, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		b.Fatal(err)
	}
	return heads
}

// child is the relay's process.
type child struct {
	cmd  *exec.Cmd
	sent *witness // what it said that it has sent
	done chan struct{}
}

func startChild(b *testing.B, url string) *child {
	b.Helper()
	c := &child{cmd: exec.Command(os.Args[0]), sent: &witness{sent: map[uuid.UUID]bool{}}, done: make(chan struct{})}
	c.cmd.Env = append(os.Environ(), childURL+"="+url)
	c.cmd.Stderr = os.Stderr
	_, err := c.cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		b.Fatal(err)
	}
	go func() {
		defer close(c.done)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			if id, err := uuid.Parse(lines.Text()); err == nil { // the kill may cut the last line
				c.sent.mu.Lock()
				c.sent.sent[id] = true
				c.sent.mu.Unlock()
			}
		}
	}()
	b.Cleanup(func() { c.kill(b) })
	return c
}

// waitFor waits until the child has sent n messages.
func (c *child) waitFor(b *testing.B, n int) {
	b.Helper()
	deadline := time.Now().Add(time.Minute)
	for {
		c.sent.mu.Lock()
		got := len(c.sent.sent)
		c.sent.mu.Unlock()
		if got >= n {
			return
		}
		if time.Now().After(deadline) {
			b.Fatalf("the child has sent %d of %d messages", got, n)
		}
		time.Sleep(time.Millisecond)
	}
}

// kill ends the child with SIGKILL and returns what it had sent.
func (c *child) kill(b *testing.B) map[uuid.UUID]bool {
	b.Helper()
	if c.cmd.ProcessState == nil {
		_ = c.cmd.Process.Kill()
		<-c.done
		_ = c.cmd.Wait()
	}
	return c.sent.sent
}
