package inbox_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/commitbox/commitbox/inbox"
)

const modelAttempts = 3

// row is what a naive inbox knows of one message: plain variables, no locks, no clock.
type row struct {
	status   string // empty: no row
	attempts int
	due      bool // of a failed row
	live     bool // of a lease
	steps    []int
	payload  bool
	result   int
	effects  int // over all time

	lease *inbox.Lease   // of a pending row
	ended *inbox.Lease   // of a row that nobody has changed since its lease ended
	stale []*inbox.Lease // taken over
}

// claim is what the naive machine answers to a claim for a handler in a transaction, or "run".
func (r *row) claim() string {
	switch {
	case r.status == "":
		return "run"
	case r.status == "completed":
		return "replayed"
	case r.status == "dead":
		return "dead"
	case r.status == "pending" && r.live, len(r.steps) > 0, r.status == "pending" && r.attempts >= modelAttempts:
		return "in_progress"
	case r.status == "failed" && !r.due:
		return "not_due"
	}
	return "run"
}

// acquire is what a claim of a lease answers, or "run".
func (r *row) acquire() string {
	switch {
	case r.status == "", r.status == "completed", r.status == "dead":
		return r.claim()
	case r.status == "failed" && !r.due:
		return "not_due"
	case r.status == "pending" && r.live:
		return "in_progress"
	case r.attempts >= modelAttempts:
		return "dead"
	}
	return "run"
}

// takeOver fences whoever had a lease.
func (r *row) takeOver() {
	for _, lease := range []*inbox.Lease{r.lease, r.ended} {
		if lease != nil {
			r.stale = append(r.stale, lease)
		}
	}
	r.lease, r.ended = nil, nil
}

func (r *row) fail(limit int) {
	r.status, r.due, r.live = "failed", false, false
	if r.attempts >= limit {
		r.status = "dead"
	}
}

func (r *row) complete(result int) {
	r.status, r.result, r.live = "completed", result, false
}

// run is an attempt of a handler in a transaction, and its answer.
func (r *row) run(end ending, value int) string {
	r.attempts++
	r.takeOver()
	if end.err == nil {
		r.complete(value)
		r.effects++
		return "ok"
	}
	r.fail(end.limit)
	return r.status
}

// record is a failure that is recorded outside the transaction that failed, and its answer.
func (r *row) record(end ending) string {
	switch {
	case r.status == "completed":
		return "ok"
	case r.status == "dead":
		return "dead"
	case r.status == "pending" && r.live:
		return "in_progress"
	}
	if r.status == "pending" {
		r.takeOver()
	}
	r.attempts++
	r.fail(end.limit)
	r.payload = r.payload || r.status == "dead"
	return r.status
}

// machine runs random operations on the inbox and on the model, and compares them after each.
type machine struct {
	w        *world
	box      *inbox.Box
	consumer string
	messages []string
	rows     []row
}

var modelRuns, modelSteps atomic.Int64

func newMachine(w *world, box *inbox.Box) *machine {
	return &machine{w: w, box: box, consumer: fmt.Sprint("run", modelRuns.Add(1)), messages: []string{"0", "1", "2"}, rows: make([]row, 3)}
}

func (m *machine) id(n int) inbox.ID { return inbox.ID{Consumer: m.consumer, Message: m.messages[n]} }

func (m *machine) message(n int) inbox.Message {
	return inbox.Message{ID: m.id(n), Payload: []byte("p")}
}

func (m *machine) draw(t *rapid.T) (int, *row) {
	n := rapid.IntRange(0, len(m.rows)-1).Draw(t, "message")
	return n, &m.rows[n]
}

// outcome names what an error stands for.
func outcome(err error) string {
	var e *inbox.Error
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, inbox.ErrLeaseLost):
		return "lost"
	case errors.As(err, &e):
		return e.Outcome.String()
	}
	return err.Error()
}

func same(t *rapid.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Fatalf("%s: %s, want %s", what, got, want)
	}
}

var errModel = errors.New("the handler fails")

// ending is a way in which a handler ends, and the number of attempts that a message has after it.
type ending struct {
	err   error
	limit int
}

var endings = []ending{{nil, 0}, {errModel, modelAttempts}, {inbox.Permanent(errModel), 1}}

func drawEnd(t *rapid.T, from []ending) (ending, int) {
	return rapid.SampledFrom(from).Draw(t, "end"), rapid.IntRange(0, 99).Draw(t, "value")
}

// Check compares every row with the model, in one round trip.
func (m *machine) Check(t *rapid.T) {
	const state = `select coalesce(i.status, 'none') || case when i.status is null then '' else format(' %s %s', i.attempts,
				(select count(*) from commitbox.inbox_step s where s.consumer = i.consumer and s.message_id = i.message_id)) end
			|| case when i.status <> 'completed' then format(' %s', i.payload is not null) else '' end
			|| format(' %s', (select count(*) from effect e where e.id = $1 || '/' || u.id))
		from unnest($2::text[]) with ordinality u (id, n) left join commitbox.inbox i on i.consumer = $1 and i.message_id = u.id order by u.n`
	rows, err := m.w.Pool.Query(context.Background(), state, m.consumer, m.messages)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	want := make([]string, len(m.rows))
	for n := range m.rows {
		r := &m.rows[n]
		switch r.status {
		case "":
			want[n] = fmt.Sprint("none ", r.effects)
		case "completed":
			want[n] = fmt.Sprint(r.status, " ", r.attempts, " ", len(r.steps), " ", r.effects)
		default:
			want[n] = fmt.Sprint(r.status, " ", r.attempts, " ", len(r.steps), " ", map[bool]string{true: "t", false: "f"}[r.payload], " ", r.effects)
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("the rows are %q, want %q", got, want)
	}
	if n := modelSteps.Add(1); n%50_000 == 0 {
		m.w.t.Logf("%d steps", n)
	}
}

func (m *machine) close() {
	for n := range m.rows {
		r := &m.rows[n]
		r.takeOver()
		for _, lease := range r.stale {
			_ = lease.Release(context.Background())
		}
	}
}

// Random operations on three messages give what a naive inbox gives: status, attempts, steps, payload, effects and
// every answer. The long form makes a million of them.
func TestModel(t *testing.T) {
	checks, steps := "10", "60"
	if os.Getenv("COMMITBOX_SOAK") != "" {
		checks, steps = "3000", "100" // nine in ten of the steps find something to do
	}
	for name, value := range map[string]string{"rapid.checks": checks, "rapid.steps": steps} {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: modelAttempts, LeaseFor: time.Hour}) // only Time ends a lease
	t.Cleanup(func() { t.Logf("%d steps in all", modelSteps.Load()-modelRuns.Load()) })
	for part := range 4 {
		t.Run(fmt.Sprint(part), func(t *testing.T) {
			t.Parallel()
			rapid.Check(t, func(t *rapid.T) {
				m := newMachine(w, box)
				defer m.close()
				t.Repeat(map[string]func(*rapid.T){
					"process": m.Process, "batch": m.Batch, "handle": m.Handle, "record": m.Record, "acquire": m.Acquire, "lease": m.EndLease,
					"leased": m.Leased, "resume": m.Resume, "time": m.Time, "operate": m.Operate, "ask": m.Ask, "purge": m.Purge, "": m.Check,
				})
			})
		})
	}
}
