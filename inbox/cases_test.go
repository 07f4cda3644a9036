package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// What has gone wrong elsewhere, where no test of a feature covers it.

func TestB09_OneBrokenRowDoesNotStopTheOthers(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for i := range 5 {
		w.exec(`insert into commitbox.inbox (consumer, message_id, status, attempts, next_attempt_at, payload, headers)
			values ('c', $1, 'failed', 1, now(), 'p', case when $2 then '{"n": 1}' else '{"n": "1"}' end::jsonb)`, fmt.Sprint(i), i == 2)
	}
	run := func(ctx context.Context, msg inbox.Message) error {
		_, err := inbox.Process(ctx, box, msg, effect(msg.ID))
		return err
	}
	if done, err := inbox.Resume(t.Context(), box, "c", run); done != 4 || !errors.Is(err, inbox.ErrDead) {
		t.Errorf("%d done, %v", done, err)
	}
	w.wantRow(inbox.ID{Consumer: "c", Message: "2"}, "dead", 2)
	if done, err := inbox.Resume(t.Context(), box, "c", run); done != 0 || err != nil {
		t.Errorf("the next one: %d done, %v", done, err)
	}
}

func TestResumeSeesBehindAFullPageOfStuckRows(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	w.exec(`insert into commitbox.inbox (consumer, message_id, status, attempts, next_attempt_at, payload)
		select 'c', n::text, 'failed', 1, now(), 'p' from generate_series(1000, 1249) n`)
	seen := 0
	_, err := inbox.Resume(t.Context(), box, "c", func(context.Context, inbox.Message) error { seen++; return errors.New("stuck") })
	if seen != 250 || err == nil {
		t.Errorf("%d rows were looked at, %v", seen, err)
	}
}

func TestB10_ARefusedMessageBlocksNobody(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 3})
	msgs := messages(50)
	refused := msgs[0].ID
	for range 4 {
		for _, a := range inbox.ProcessBatch(t.Context(), box, msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]string, error) {
			for _, m := range msgs {
				if m.ID == refused {
					return nil, errors.New("refused")
				}
			}
			return writeAll(ctx, tx, msgs)
		})[1:] {
			if a.Err != nil {
				t.Fatal(a.Err)
			}
		}
		w.makeDue(refused)
	}
	w.wantRow(refused, "dead", 3)
	if n := one[int](w, `select count(*)::int from (select id from effect group by id having count(*) = 1) as e`); n != 49 {
		t.Errorf("%d others have one effect", n)
	}
	if n := one[int](w, `select count(*)::int from pg_stat_activity where datname = current_database() and state like 'idle in transaction%'`); n != 0 {
		t.Errorf("%d transactions are open", n)
	}
}

func TestB11_PermanentErrorsEndAtOnce(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 3})
	for code, tries := range map[string]int{"22001": 1, "23514": 1, "42703": 1, "23505": 3, "P0001": 3} {
		id := inbox.ID{Consumer: "c", Message: code}
		got := 0
		var err error
		for ; got < 5 && !errors.Is(err, inbox.ErrDead); got++ {
			_, err = inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
				_, err := tx.Exec(ctx, fmt.Sprintf(`do $$ begin raise exception 'x' using errcode = '%s', table = 'orders', column = 'note'; end $$`, code))
				return inbox.Void{}, err
			})
			w.makeDue(id)
		}
		var pg *pgconn.PgError
		if got != tries || !errors.As(err, &pg) || pg.Code != code {
			t.Errorf("%s: %d tries, want %d: %v", code, got, tries, err)
		}
		if e, err := box.Get(t.Context(), id); err != nil || !strings.Contains(e.LastError, code) || !strings.Contains(e.LastError, "(table orders, column note)") {
			t.Errorf("%s: the row says %q, %v", code, e.LastError, err)
		}
	}
}

func TestSerializationFailuresAreRunAgain(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for _, code := range []string{"40001", "40P01"} {
		id := inbox.ID{Consumer: "c", Message: code}
		runs := 0
		res, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (int, error) {
			if runs++; runs < 3 {
				_, err := tx.Exec(ctx, fmt.Sprintf(`do $$ begin raise exception 'x' using errcode = '%s'; end $$`, code))
				return 0, err
			}
			return runs, write(ctx, tx, id, "")
		})
		if err != nil || res.Value != 3 || res.Attempt != 1 {
			t.Errorf("%s: %+v, %v", code, res, err)
		}
		runs = -1000
		_, err = inbox.Process(t.Context(), box, inbox.Message{ID: inbox.ID{Consumer: "always", Message: code}}, func(ctx context.Context, tx pgx.Tx) (int, error) {
			runs++
			_, err := tx.Exec(ctx, fmt.Sprintf(`do $$ begin raise exception 'x' using errcode = '%s'; end $$`, code))
			return 0, err
		})
		if !errors.Is(err, inbox.ErrUnavailable) || runs != -1000+6 {
			t.Errorf("%s for ever: %d runs, %v", code, runs+1000, err)
		}
		w.wantRow(inbox.ID{Consumer: "always", Message: code}, "", 0)
	}
}

func TestB30_WaitersTakeOverWhenTheFirstFails(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{Wait: patience, BackoffBase: time.Nanosecond, BackoffMax: time.Nanosecond})
	var runs atomic.Int32
	started := make(chan struct{})
	first := make(chan inbox.Outcome, 1)
	go func() {
		res, _ := inbox.Process(context.Background(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (int, error) {
			close(started)
			time.Sleep(200 * time.Millisecond)
			return 0, errors.Join(write(ctx, tx, anID, "first"), errors.New("rolls back"))
		})
		first <- res.Outcome
	}()
	<-started
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			res, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (int, error) {
				return int(runs.Add(1)), write(ctx, tx, anID, "other")
			})
			if err != nil || res.Value != 1 {
				t.Errorf("%+v, %v", res, err)
			}
		})
	}
	wg.Wait()
	if outcome := <-first; outcome == inbox.Executed { // it failed, or was overtaken before its failure was recorded
		t.Error("the first one was executed")
	}
	if runs.Load() != 1 {
		t.Errorf("%d of the others ran", runs.Load())
	}
	w.wantEffects(anID, 1)
}

func TestHandleWaits(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{Wait: patience})
	started, finish, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := inbox.Process(context.Background(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (int, error) {
			close(started)
			<-finish
			return 3, write(ctx, tx, anID, "")
		})
		done <- err
	}()
	<-started
	strict := w.begin(pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	ask := func(tx pgx.Tx) (inbox.Result[int], error) {
		return inbox.Handle(t.Context(), tx, anID, func(context.Context) (int, error) { t.Error("ran"); return 0, nil }, inbox.Using(box))
	}
	if _, err := ask(strict); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("repeatable read cannot see the end, so it must not wait: %v", err)
	}
	time.AfterFunc(200*time.Millisecond, func() { close(finish) })
	if res, err := ask(w.begin()); err != nil || !res.Replayed || res.Value != 3 {
		t.Errorf("read committed: %+v, %v", res, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestB33_IDsOfEveryLength(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for _, size := range []int{255, 256, 512, 513, 2000, 3000, 100_000} {
		text := make([]byte, size)
		for i := range text {
			text[i] = byte('!' + rand.IntN(90))
		}
		id := inbox.ID{Consumer: "c", Message: string(text)}
		for range 2 {
			_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, effect(id))
			var input *commitbox.InputError
			if size <= 512 && err != nil || size > 512 && (!errors.As(err, &input) || input.Size != size || input.Limit != 512) {
				t.Errorf("%d bytes: %v", size, err)
			}
		}
		w.wantEffects(id, map[bool]int{true: 1, false: 0}[size <= 512])
	}
}

func TestB40_RedeliveryAfterALostAckIsAcked(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for delivery := 1; delivery <= 3; delivery++ {
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID, Delivery: delivery}, effect(anID))
		if inbox.Disposition(err) != (inbox.Action{Verdict: inbox.Ack}) {
			t.Errorf("delivery %d: %v", delivery, err)
		}
	}
	w.wantEffects(anID, 1)
}

func TestB75_B76_BytesStayAsTheyAre(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	for i, payload := range []string{
		`{"a":"\u0000"}`, "\x00", "\xff\xfe", `"\ud800"`, `{"b":1e2,"aa":1.10,"b":2}`, "1e400", "0.10", "12345678901234567890", "{} \n", "",
	} {
		id := inbox.ID{Consumer: "c", Message: fmt.Sprint(i)}
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id, Payload: []byte(payload)}, func(context.Context, pgx.Tx) (inbox.Void, error) {
			return inbox.Void{}, inbox.Permanent(fmt.Errorf("cannot read %s\x00\xff", payload))
		})
		if !errors.Is(err, inbox.ErrDead) {
			t.Errorf("%q: %v", payload, err)
		}
		e, err := box.Get(t.Context(), id)
		if err != nil || string(e.Payload) != payload || !e.PayloadKept || !strings.Contains(e.LastError, "cannot read") {
			t.Errorf("%q: the row holds %q, %q, %v", payload, e.Payload, e.LastError, err)
		}
		id.Consumer = "result"
		for range 2 {
			res, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(context.Context, pgx.Tx) ([]byte, error) { return []byte(payload), nil })
			if err != nil || string(res.Value) != payload {
				t.Errorf("%q: result %q, %v", payload, res.Value, err)
			}
		}
	}
}

func TestContextEndsAtAnyPoint(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{BackoffBase: time.Nanosecond, BackoffMax: time.Nanosecond, MaxAttempts: 1000})
	for i := range 60 {
		id := inbox.ID{Consumer: "c", Message: fmt.Sprint(i % 6)}
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(rand.IntN(5000))*time.Microsecond)
		_, err := inbox.Process(ctx, box, inbox.Message{ID: id}, effect(id))
		cancel()
		if verdict := inbox.Disposition(err).Verdict; verdict == inbox.DeadLetter {
			t.Errorf("%s: %v", id, err)
		}
	}
	for i := range 6 {
		id := inbox.ID{Consumer: "c", Message: fmt.Sprint(i)}
		if _, err := inbox.Process(t.Context(), w.box(inbox.Config{IgnoreDue: true, Wait: patience, MaxAttempts: 1000}), inbox.Message{ID: id}, effect(id)); err != nil {
			t.Error(err)
		}
		w.wantEffects(id, 1)
	}
}

func TestCommitIsSentThoughTheContextEnds(t *testing.T) {
	w := newWorld(t)
	ctx, cancel := context.WithCancel(t.Context())
	res, err := inbox.Process(ctx, w.box(inbox.Config{}), inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (string, error) {
		err := write(ctx, tx, anID, "")
		cancel()
		return "r", err
	})
	if err != nil || res.Outcome != inbox.Executed || res.Value != "r" {
		t.Errorf("%+v, %v", res, err)
	}
	w.wantEffects(anID, 1)
	w.wantRow(anID, "completed", 1)
}

func TestRowsEditedByHand(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	run := func(context.Context, pgx.Tx) (int, error) { return 1, nil }
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, run); err != nil {
		t.Fatal(err)
	}
	w.exec(`update commitbox.inbox set result = 'nonsense'`)
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, run); !errors.Is(err, inbox.ErrNoResult) {
		t.Errorf("a spoilt result: %v", err)
	}
	for _, sql := range []string{
		`update commitbox.inbox set status = 'pending'`, `update commitbox.inbox set status = 'done'`, `update commitbox.inbox set finished_at = null`,
		`update commitbox.inbox set status = 'failed'`, `update commitbox.inbox set attempts = -1`, `update commitbox.inbox set lease_until = now()`,
	} {
		if _, err := w.Pool.Exec(t.Context(), sql); err == nil {
			t.Errorf("the table took %q", sql)
		}
	}
}

type counts struct {
	mu   sync.Mutex
	seen map[string]float64
}

func (c *counts) Observe(m *commitbox.Metric, value float64, labels ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if m.Kind == commitbox.Counter {
		c.seen[m.Name+fmt.Sprint(labels)] += value
	}
}

func TestOutcomesAreCounted(t *testing.T) {
	w := newWorld(t)
	seen := &counts{seen: map[string]float64{}}
	box := w.box(inbox.Config{Observer: seen})
	for range 3 {
		if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]float64{
		"commitbox_inbox_handled[payments.charge executed table]": 1,
		"commitbox_inbox_handled[payments.charge replayed table]": 2,
	}
	if fmt.Sprint(seen.seen) != fmt.Sprint(want) {
		t.Errorf("counted %v, want %v", seen.seen, want)
	}
}

// Work that takes several leases runs once, however often another worker asks, because its lease is renewed. When the
// renewals stop, the other one takes over after the lease and not before, and what the first one did is refused.
func TestB02_WorkLongerThanItsLeaseRunsOnce(t *testing.T) {
	const lease = 2 * time.Second
	w, first, proxy := proxied(t, inbox.Config{LeaseFor: lease})
	second := w.box(inbox.Config{LeaseFor: lease})
	msg := inbox.Message{ID: anID, Payload: []byte("p")}
	ask := func(until func() bool) (lease *inbox.Lease, since time.Duration) {
		for began := time.Now(); !until(); time.Sleep(100 * time.Millisecond) {
			lease, err := second.Acquire(t.Context(), msg)
			if err == nil {
				return lease, time.Since(began)
			}
			if !errors.Is(err, inbox.ErrInProgress) {
				t.Errorf("another worker: %v", err)
			}
		}
		return nil, 0
	}
	_, err := inbox.ProcessLeased(t.Context(), first, msg, func(ctx context.Context, _ *inbox.Lease) (int, error) {
		until := time.Now().Add(3 * lease)
		if taken, _ := ask(func() bool { return time.Now().After(until) || ctx.Err() != nil }); taken != nil {
			t.Error("another worker got the lease while it was renewed")
		}
		if ctx.Err() != nil {
			t.Errorf("the holder lost its lease: %v", context.Cause(ctx))
		}

		proxy.BlackHole(testenv.ToServer) // nothing reaches PostgreSQL any more
		taken, since := ask(func() bool { return false })
		if since < lease/2 {
			t.Errorf("taken over after %v, the lease was renewed at most %v before its end", since, lease)
		}
		proxy.Heal()
		if _, err := inbox.Complete(ctx, taken, 2); err != nil {
			t.Errorf("the second worker: %v", err)
		}
		return 1, nil
	})
	if !errors.Is(err, inbox.ErrLeaseLost) {
		t.Errorf("the first worker: %v, want ErrLeaseLost", err)
	}
	if got, done, err := inbox.IsCompleted[int](t.Context(), second, anID); got != 2 || !done || err != nil {
		t.Errorf("the result is %d, %v, %v; want the second worker's", got, done, err)
	}
}
