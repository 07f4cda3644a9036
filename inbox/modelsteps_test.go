package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"
	"pgregory.net/rapid"

	"github.com/commitbox/commitbox/inbox"
)

// answered compares the answer to a delivery with the model's.
func (m *machine) answered(t *rapid.T, what string, r *row, end ending, value int, res inbox.Result[int], err error) {
	switch answer := r.claim(); answer {
	case "replayed":
		same(t, what, fmt.Sprint(res.Replayed, res.Value, err), fmt.Sprint(true, r.result, nil))
	case "run":
		if end.err == nil {
			same(t, what, outcome(err), r.run(end, value))
			return
		}
		same(t, what, outcome(err), r.record(end)) // what ran is rolled back first
	default:
		same(t, what, outcome(err), answer)
	}
}

func (m *machine) Process(t *rapid.T) {
	n, r := m.draw(t)
	end, value := drawEnd(t, endings)
	res, err := inbox.Process(context.Background(), m.box, m.message(n), func(ctx context.Context, tx pgx.Tx) (int, error) {
		return value, errors.Join(write(ctx, tx, m.id(n), ""), end.err)
	})
	m.answered(t, "process", r, end, value, res, err)
}

// Batch gives several messages, some of them twice.
func (m *machine) Batch(t *rapid.T) {
	which := rapid.SliceOfN(rapid.IntRange(0, len(m.rows)-1), 1, 5).Draw(t, "messages")
	msgs, end := make([]inbox.Message, len(which)), make([]ending, len(m.rows))
	for i, n := range which {
		msgs[i] = m.message(n)
	}
	for n := range end {
		end[n], _ = drawEnd(t, endings)
	}
	value := rapid.IntRange(0, 99).Draw(t, "value")
	answers := inbox.ProcessBatch(context.Background(), m.box, msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) (values []int, err error) {
		for _, msg := range msgs {
			n := slices.Index(m.messages, msg.ID.Message)
			values, err = append(values, value+n), errors.Join(err, write(ctx, tx, msg.ID, ""), end[n].err)
		}
		return values, err
	})
	for i, n := range which {
		first := slices.Index(which, n)
		if first == i {
			m.answered(t, "batch", &m.rows[n], end[n], value+n, answers[i].Result, answers[i].Err)
			continue
		}
		same(t, "copy in a batch", outcome(answers[i].Err), outcome(answers[first].Err))
		same(t, "copy in a batch", fmt.Sprint(answers[i].Value, answers[i].Replayed), fmt.Sprint(answers[first].Value, answers[first].Err == nil))
	}
}

// Handle is followed by COMMIT or ROLLBACK, and by RecordFailure or not.
func (m *machine) Handle(t *rapid.T) {
	n, r := m.draw(t)
	end, value := drawEnd(t, endings)
	commits, records := rapid.Bool().Draw(t, "commits"), rapid.Bool().Draw(t, "records")
	tx, err := m.w.Pool.Begin(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = inbox.Handle(context.Background(), tx, m.id(n), func(ctx context.Context) (int, error) {
		return value, errors.Join(write(ctx, tx, m.id(n), ""), end.err)
	}, inbox.Using(m.box))
	if commits {
		if err := tx.Commit(context.Background()); err != nil {
			t.Fatal(err)
		}
	} else if err := tx.Rollback(context.Background()); err != nil {
		t.Fatal(err)
	}
	answer := r.claim()
	if answer == "run" {
		after := *r
		after.stale = slices.Clone(r.stale)
		same(t, "handle", outcome(err), after.run(end, value))
		if commits {
			*r = after
		}
	} else {
		same(t, "handle", outcome(err), map[bool]string{true: "ok", false: answer}[answer == "replayed"])
	}
	if !records || err == nil {
		return
	}
	got := outcome(inbox.RecordFailure(context.Background(), m.box, m.message(n), err))
	switch {
	case answer != "run": // it did not run, so there is nothing to record
		same(t, "record", got, answer)
	case commits: // it is recorded already
		same(t, "record", got, r.claim())
	default:
		same(t, "record", got, r.record(end))
	}
}

// Record is the failure of something around Handle, which says nothing of the row that the attempt saw.
func (m *machine) Record(t *rapid.T) {
	n, r := m.draw(t)
	end, _ := drawEnd(t, endings[1:])
	same(t, "record", outcome(inbox.RecordFailure(context.Background(), m.box, m.message(n), end.err)), r.record(end))
}

// leased is the answer to a claim of a lease, and what it does to the row.
func (m *machine) leased(r *row) string {
	answer := r.acquire()
	switch {
	case answer == "run":
		r.takeOver()
		r.status, r.live, r.payload = "pending", true, true
		r.attempts++
		return "ok"
	case answer == "dead" && r.status != "dead":
		r.takeOver()
		r.fail(0)
	}
	return answer
}

func (m *machine) Acquire(t *rapid.T) {
	n, r := m.draw(t)
	lease, err := m.box.Acquire(context.Background(), m.message(n))
	same(t, "acquire", outcome(err), m.leased(r))
	if err == nil {
		r.lease = lease
	}
}

// Leased takes a lease, makes a step or not, and ends in one of the ways of a handler.
func (m *machine) Leased(t *rapid.T) {
	n, r := m.draw(t)
	end, value := drawEnd(t, endings)
	step := rapid.Bool().Draw(t, "step")
	res, err := inbox.ProcessLeased(context.Background(), m.box, m.message(n), func(ctx context.Context, lease *inbox.Lease) (int, error) {
		if step {
			if _, err := inbox.Step(ctx, lease, fmt.Sprint(len(r.steps)), func(context.Context) (int, error) { return value, nil }); err != nil {
				return 0, err
			}
		}
		return value, end.err
	})
	switch answer := m.leased(r); answer {
	case "replayed":
		same(t, "leased", fmt.Sprint(res.Replayed, res.Value, err), fmt.Sprint(true, r.result, nil))
		return
	case "ok":
	default:
		same(t, "leased", outcome(err), answer)
		return
	}
	if step {
		r.steps = append(r.steps, value)
	}
	want := "ok"
	if end.err == nil {
		r.complete(value)
	} else {
		r.fail(end.limit)
		want = r.status
	}
	same(t, "leased", outcome(err), want)
}

// EndLease uses a lease: the one that is held, one that was taken over, or the one that ended last.
func (m *machine) EndLease(t *rapid.T) {
	n, r := m.draw(t)
	how := rapid.SampledFrom([]string{"complete", "complete in", "fail in", "fail", "release", "step", "step again"}).Draw(t, "how")
	value := rapid.IntRange(0, 99).Draw(t, "value")
	lease := r.lease
	switch rapid.SampledFrom([]string{"held", "stale", "ended"}).Draw(t, "which") {
	case "stale":
		if len(r.stale) > 0 {
			lease = r.stale[len(r.stale)-1]
		}
	case "ended":
		lease = r.ended
	}
	if lease == nil || how == "step again" && len(r.steps) == 0 {
		t.Skip("nothing to use")
	}
	ran := false
	got, err := m.use(n, lease, how, value, &ran)
	switch lease {
	case r.lease:
		m.endedBy(t, r, how, value, got, err)
	case r.ended:
		m.usedAfterwards(t, r, how, got, ran, err)
	default:
		if how != "release" || err != nil { // a lease that knows of its loss has nothing to release
			same(t, how+" of a lost lease", fmt.Sprint(outcome(err), ran), fmt.Sprint("lost", false))
		}
	}
}

func (m *machine) use(n int, lease *inbox.Lease, how string, value int, ran *bool) (int, error) {
	ctx := context.Background()
	switch how {
	case "complete":
		return inbox.Complete(ctx, lease, value)
	case "complete in", "fail in":
		return inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (int, error) {
			*ran = true
			err := write(ctx, tx, m.id(n), "")
			if how == "fail in" {
				err = errModel
			}
			return value, err
		})
	case "fail":
		return 0, lease.Fail(ctx, errModel)
	case "release":
		return 0, lease.Release(ctx)
	}
	name := len(m.rows[n].steps)
	if how == "step again" {
		name--
	}
	return inbox.Step(ctx, lease, fmt.Sprint(name), func(context.Context) (int, error) { *ran = how == "step again"; return value, nil })
}

// endedBy compares what the holder of a lease did with it.
func (m *machine) endedBy(t *rapid.T, r *row, how string, value, got int, err error) {
	want := "ok"
	switch how {
	case "complete", "complete in":
		r.complete(value)
		if how == "complete in" {
			r.effects++
		}
	case "fail in":
		want, r.live = errModel.Error(), true // the lease goes on, and is renewed if it had run out
	case "fail":
		r.fail(modelAttempts)
		want = r.status
	case "release":
		r.status, r.due, r.live = "failed", true, false
		r.attempts--
	case "step":
		r.steps = append(r.steps, value)
	case "step again":
		same(t, how, fmt.Sprint(got), fmt.Sprint(r.steps[len(r.steps)-1]))
	}
	if r.status != "pending" {
		r.lease, r.ended = nil, r.lease
	}
	same(t, how, outcome(err), want)
}

// usedAfterwards compares what is done with a lease that its holder has ended already.
func (m *machine) usedAfterwards(t *rapid.T, r *row, how string, got int, ran bool, err error) {
	completes := how == "complete" || how == "complete in" || how == "fail in"
	want := "lost"
	switch {
	case how == "release":
		want = "ok"
	case how == "fail" && r.status != "completed":
		want = r.status
	case completes && r.status == "completed":
		want = "ok"
	}
	same(t, how+" of an ended lease", fmt.Sprint(outcome(err), ran), fmt.Sprint(want, false))
	if err == nil && how != "complete" && completes {
		same(t, how+" again", fmt.Sprint(got), fmt.Sprint(r.result))
	}
}

// Resume brings back whatever holds its payload and is due.
func (m *machine) Resume(t *rapid.T) {
	value := rapid.IntRange(0, 99).Draw(t, "value")
	var seen []string
	done, err := inbox.Resume(context.Background(), m.box, m.consumer, func(ctx context.Context, msg inbox.Message) error {
		seen = append(seen, msg.ID.Message)
		_, err := inbox.Process(ctx, m.box, msg, func(ctx context.Context, tx pgx.Tx) (int, error) {
			return value, errors.Join(write(ctx, tx, msg.ID, ""), map[bool]error{string(msg.Payload) != "p": errModel}[true])
		})
		return err
	})
	var want []string
	ran := 0
	for n := range m.rows {
		r := &m.rows[n]
		if !r.payload || (r.status != "failed" || !r.due) && (r.status != "pending" || r.live) {
			continue
		}
		want = append(want, m.messages[n])
		if r.claim() == "run" {
			r.run(endings[0], value)
			ran++
		}
	}
	slices.Sort(seen)
	same(t, "resume", fmt.Sprint(seen, done, err == nil), fmt.Sprint(want, ran, ran == len(want)))
}

func (m *machine) Time(t *rapid.T) {
	n, r := m.draw(t)
	m.w.exec(`update commitbox.inbox set next_attempt_at = next_attempt_at - interval '1 day', lease_until = lease_until - interval '1 day'
		where consumer = $1 and message_id = $2`, m.consumer, m.messages[n])
	r.due, r.live = true, false
}

func (m *machine) Operate(t *rapid.T) {
	n, r := m.draw(t)
	idle := r.status == "failed" || r.status == "dead"
	expired := r.status == "pending" && !r.live
	switch what := rapid.SampledFrom([]string{"requeue", "discard", "mark"}).Draw(t, "what"); what {
	case "requeue":
		kept, err := m.box.Requeue(context.Background(), m.id(n), "")
		same(t, what, fmt.Sprint(err == nil, kept), fmt.Sprint(idle, idle && r.payload))
		if idle {
			r.takeOver()
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
		}
	}
}

// Ask reads, which changes nothing.
func (m *machine) Ask(t *rapid.T) {
	n, r := m.draw(t)
	value, completed, err := inbox.IsCompleted[int](context.Background(), m.box, m.id(n))
	want := 0
	if r.status == "completed" {
		want = r.result
	}
	same(t, "ask", fmt.Sprint(value, completed, err), fmt.Sprint(want, r.status == "completed", nil))
	entry, err := m.box.Get(context.Background(), m.id(n))
	same(t, "get", fmt.Sprint(entry.Status, entry.Attempts, errors.Is(err, inbox.ErrNotFound)), fmt.Sprint(r.status, r.attempts, r.status == ""))
}

// Purge is retention.
func (m *machine) Purge(t *rapid.T) {
	n, r := m.draw(t)
	m.w.exec(`delete from commitbox.inbox where consumer = $1 and message_id = $2 and status in ('completed', 'dead')`, m.consumer, m.messages[n])
	if r.status == "completed" || r.status == "dead" {
		r.takeOver()
		*r = row{effects: r.effects, stale: r.stale}
	}
}
