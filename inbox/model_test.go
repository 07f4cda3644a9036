package inbox_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"sync/atomic"
	"testing"

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
	steps    int
	payload  bool
	result   int
	effects  int // over all time

	lease *inbox.Lease   // of a pending row
	stale []*inbox.Lease // taken over
}

// The naive machine: what a claim for a handler in a transaction answers, or "run".
func (r *row) claim() string {
	switch {
	case r.status == "":
		return "run"
	case r.status == "completed":
		return "replayed"
	case r.status == "dead":
		return "dead"
	case r.status == "pending" && r.live, r.steps > 0, r.status == "pending" && r.attempts >= modelAttempts:
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

func (r *row) takeOver() {
	if r.lease != nil {
		r.stale, r.lease = append(r.stale, r.lease), nil
	}
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

// machine runs random operations on the inbox and on the model, and compares them after each.
type machine struct {
	w        *world
	box      *inbox.Box
	consumer string
	rows     [3]row
}

var modelRuns atomic.Int64

func (m *machine) id(n int) inbox.ID { return inbox.ID{Consumer: m.consumer, Message: fmt.Sprint(n)} }

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

// ends are the ways in which a handler ends, and the number of attempts that a message has after them.
var ends = []struct {
	err   error
	limit int
}{{nil, 0}, {errModel, modelAttempts}, {inbox.Permanent(errModel), 1}}

func (m *machine) Process(t *rapid.T) {
	n, r := m.draw(t)
	end, value := rapid.SampledFrom(ends).Draw(t, "end"), rapid.IntRange(0, 99).Draw(t, "value")
	res, err := inbox.Process(context.Background(), m.box, inbox.Message{ID: m.id(n), Payload: []byte("p")}, func(ctx context.Context, tx pgx.Tx) (int, error) {
		return value, errors.Join(write(ctx, tx, m.id(n), ""), end.err)
	})
	answer := r.claim()
	switch {
	case answer == "replayed":
		same(t, "process", fmt.Sprint(res.Replayed, res.Value, err), fmt.Sprint(true, r.result, nil))
	case answer != "run":
		same(t, "process", outcome(err), answer)
	default:
		r.attempts++
		r.takeOver()
		if end.err == nil {
			same(t, "process", outcome(err), "ok")
			r.complete(value)
			r.effects++
			return
		}
		r.fail(end.limit)
		r.payload = r.payload || r.status == "dead"
		same(t, "process", outcome(err), r.status)
	}
}

func (m *machine) Handle(t *rapid.T) {
	n, r := m.draw(t)
	end, value := rapid.SampledFrom(ends).Draw(t, "end"), rapid.IntRange(0, 99).Draw(t, "value")
	commits := rapid.Bool().Draw(t, "commits")
	tx, err := m.w.Pool.Begin(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = inbox.Handle(context.Background(), tx, m.id(n), func(ctx context.Context) (int, error) {
		return value, errors.Join(write(ctx, tx, m.id(n), ""), end.err)
	}, inbox.Using(m.box))
	answer := r.claim()
	if commits {
		if err := tx.Commit(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	if answer != "run" {
		same(t, "handle", outcome(err), map[bool]string{true: "ok", false: answer}[answer == "replayed"])
		return
	}
	after := *r
	after.attempts++
	after.takeOver()
	if end.err == nil {
		after.complete(value)
		after.effects++
		same(t, "handle", outcome(err), "ok")
	} else {
		after.fail(end.limit)
		same(t, "handle", outcome(err), after.status)
	}
	if commits {
		*r = after
	}
}

func (m *machine) Acquire(t *rapid.T) {
	n, r := m.draw(t)
	lease, err := m.box.Acquire(context.Background(), inbox.Message{ID: m.id(n), Payload: []byte("p")})
	answer := r.acquire()
	if answer != "run" {
		same(t, "acquire", outcome(err), answer)
		if answer == "dead" && r.status != "dead" {
			r.takeOver()
			r.fail(0)
		}
		return
	}
	same(t, "acquire", outcome(err), "ok")
	r.takeOver()
	r.status, r.live, r.lease, r.payload = "pending", true, lease, true
	r.attempts++
}

func (m *machine) EndLease(t *rapid.T) {
	n, r := m.draw(t)
	how := rapid.SampledFrom([]string{"complete", "complete in", "fail", "release", "step"}).Draw(t, "how")
	value := rapid.IntRange(0, 99).Draw(t, "value")
	lease := r.lease
	if len(r.stale) > 0 && rapid.Bool().Draw(t, "stale") {
		lease = r.stale[len(r.stale)-1]
	}
	if lease == nil {
		t.Skip("no lease")
	}
	var err error
	switch how {
	case "complete":
		_, err = inbox.Complete(context.Background(), lease, value)
	case "complete in":
		_, err = inbox.CompleteIn(context.Background(), lease, func(ctx context.Context, tx pgx.Tx) (int, error) { return value, write(ctx, tx, m.id(n), "") })
	case "fail":
		err = lease.Fail(context.Background(), errModel)
	case "release":
		err = lease.Release(context.Background())
	case "step":
		_, err = inbox.Step(context.Background(), lease, fmt.Sprint("step", r.steps), func(context.Context) (int, error) { return value, nil })
	}
	if lease != r.lease {
		if how != "release" || err != nil { // a lease that knows of its loss has nothing to release
			same(t, how+" of a lost lease", outcome(err), "lost")
		}
		return
	}
	m.endedBy(t, r, how, value, err)
}

func (m *machine) endedBy(t *rapid.T, r *row, how string, value int, err error) {
	want := "ok"
	switch how {
	case "complete", "complete in":
		r.complete(value)
		r.payload = false
		if how == "complete in" {
			r.effects++
		}
	case "fail":
		r.fail(modelAttempts)
		want = r.status
	case "release":
		r.status, r.due, r.live = "failed", true, false
		r.attempts--
	case "step":
		r.steps++
	}
	if how != "step" {
		r.lease = nil
	}
	same(t, how, outcome(err), want)
}

func (m *machine) Time(t *rapid.T) {
	n, r := m.draw(t)
	m.w.makeDue(m.id(n))
	m.w.expire(m.id(n))
	r.due, r.live = true, false
}

func (m *machine) Operate(t *rapid.T) {
	n, r := m.draw(t)
	idle := r.status == "failed" || r.status == "dead"
	expired := r.status == "pending" && !r.live
	switch what := rapid.SampledFrom([]string{"requeue", "discard", "mark"}).Draw(t, "what"); what {
	case "requeue":
		_, err := m.box.Requeue(context.Background(), m.id(n), "")
		same(t, what, fmt.Sprint(err == nil), fmt.Sprint(idle))
		if idle {
			r.status, r.attempts, r.due = "failed", 0, true
		}
	case "discard":
		err := m.box.Discard(context.Background(), m.id(n), "")
		same(t, what, fmt.Sprint(err == nil), fmt.Sprint(idle || expired))
		if idle || expired {
			r.takeOver()
			r.fail(0)
		}
	case "mark":
		err := pgx.BeginFunc(context.Background(), m.w.Pool, func(tx pgx.Tx) error { return inbox.MarkCompleted(context.Background(), tx, m.id(n), 7, "") })
		held := r.status == "pending" && r.live
		same(t, what, outcome(err), map[bool]string{true: "in_progress", false: "ok"}[held])
		if !held && r.status != "completed" {
			r.takeOver()
			r.complete(7)
			r.payload = false
		}
	}
}

// Purge is retention.
func (m *machine) Purge(t *rapid.T) {
	n, r := m.draw(t)
	m.w.exec(`delete from commitbox.inbox where consumer = $1 and message_id = $2 and status in ('completed', 'dead')`, m.consumer, m.id(n).Message)
	if r.status == "completed" || r.status == "dead" {
		*r = row{effects: r.effects, stale: r.stale}
	}
}

// Check compares every row with the model.
func (m *machine) Check(t *rapid.T) {
	for n := range m.rows {
		r, id := &m.rows[n], m.id(n)
		got := one[string](m.w, `select coalesce((select concat_ws(' ', status, attempts, (select count(*) from commitbox.inbox_step s where s.consumer = i.consumer and s.message_id = i.message_id),
				case when status <> 'completed' then payload is not null end) from commitbox.inbox i where consumer = $1 and message_id = $2), 'none')
			|| ' ' || (select count(*) from effect where id = $3)`, id.Consumer, id.Message, id.String())
		want := fmt.Sprintf("%s %d %d", r.status, r.attempts, r.steps)
		switch {
		case r.status == "":
			want = "none"
		case r.status != "completed":
			want += map[bool]string{true: " t", false: " f"}[r.payload]
		}
		same(t, id.String(), got, fmt.Sprintf("%s %d", want, r.effects))
	}
}

func (m *machine) close() {
	for n := range m.rows {
		for _, lease := range append(m.rows[n].stale, m.rows[n].lease) {
			if lease != nil {
				_ = lease.Release(context.Background())
			}
		}
	}
}

// Random operations on three messages give what a naive inbox gives: status, attempts, steps, payload, effects and
// every answer.
func TestModel(t *testing.T) {
	checks, steps := "40", "60"
	if os.Getenv("COMMITBOX_SOAK") != "" {
		checks, steps = "10000", "100"
	}
	for name, value := range map[string]string{"rapid.checks": checks, "rapid.steps": steps} {
		if err := flag.Set(name, value); err != nil {
			t.Fatal(err)
		}
	}
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: modelAttempts})
	rapid.Check(t, func(t *rapid.T) {
		m := &machine{w: w, box: box, consumer: fmt.Sprint("run", modelRuns.Add(1))}
		defer m.close()
		t.Repeat(map[string]func(*rapid.T){
			"process": m.Process, "handle": m.Handle, "acquire": m.Acquire, "lease": m.EndLease, "time": m.Time,
			"operate": m.Operate, "purge": m.Purge, "": m.Check,
		})
	})
}
