package outbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestB12_BackoffNeverOverflows(t *testing.T) {
	b := backoff{base: time.Second, max: 5 * time.Minute}
	for _, failures := range []int{0, 1, 2, 9, 30, 40, 62, 63, 64, 1000, math.MaxInt32} {
		for _, random := range []float64{0, 0.5, 0.999999} {
			d := b.delay(failures, random)
			if d < b.base/2 || d > b.max {
				t.Errorf("delay(%d, %v) = %v, not within %v and %v", failures, random, d, b.base/2, b.max)
			}
		}
	}
	for failures, ceiling := range map[int]time.Duration{1: time.Second, 2: 2 * time.Second, 4: 8 * time.Second, 9: 256 * time.Second, 10: 5 * time.Minute} {
		if d := b.delay(failures, math.Nextafter(1, 0)); d > ceiling || d < ceiling-time.Millisecond {
			t.Errorf("longest delay after %d failures is %v, want %v", failures, d, ceiling)
		}
	}
}

func TestA2_WavesHoldOneMessagePerKeyInOrder(t *testing.T) {
	rows := make([]row, 0)
	for _, key := range []string{"a", "", "b", "a", "", "a", "b"} {
		rows = append(rows, row{Record: Record{Message: Message{Key: key}}})
	}
	want := [][]int{{0, 1, 2, 4}, {3, 6}, {5}}
	if diff := cmp.Diff(want, waves(rows, byKey)); diff != "" {
		t.Error(diff)
	}
}

func TestDecide(t *testing.T) {
	boom := errors.New("boom")
	keyed := row{ref: ref{shard: 3, id: 7}, Record: Record{Message: Message{Key: "k"}, Attempt: 1}}
	last := keyed
	last.Attempt = 5
	waiting := last
	waiting.deferred = true
	loose := row{ref: ref{shard: 4, id: 8}, Record: Record{Attempt: 2}}
	key := keyRef{3, "k"}
	for name, tc := range map[string]struct {
		row     row
		verdict verdict
		hold    bool
		want    decision
	}{
		"confirmed":       {row: keyed, verdict: verdict{}, want: decision{tried: true, confirmed: []found{{ref: keyed.ref}}}},
		"not tried":       {row: keyed, verdict: verdict{resultNotTried, ErrNotTried}, want: decision{left: []int{0}}},
		"away":            {row: keyed, verdict: verdict{resultUnavailable, boom}, want: decision{tried: true, left: []int{0}}},
		"fails":           {row: keyed, verdict: verdict{resultRetryable, boom}, want: decision{tried: true, change: change{deferred: []failure{{keyed.ref, 1, "boom", time.Second}}, block: []blocked{{key, time.Second}}}}},
		"fails, no key":   {row: loose, verdict: verdict{resultRetryable, boom}, want: decision{tried: true, change: change{deferred: []failure{{loose.ref, 2, "boom", 2 * time.Second}}}}},
		"last attempt":    {row: last, verdict: verdict{resultRetryable, boom}, want: decision{tried: true, change: change{buried: []failure{{ref: keyed.ref, text: "boom"}}}}},
		"permanent":       {row: keyed, verdict: verdict{resultPermanent, boom}, want: decision{tried: true, change: change{buried: []failure{{ref: keyed.ref, text: "boom"}}}}},
		"permanent, hold": {row: keyed, verdict: verdict{resultPermanent, boom}, hold: true, want: decision{tried: true, change: change{buried: []failure{{ref: keyed.ref, text: "boom"}}, hold: []held{{key, 7}}}}},
		"head dies":       {row: waiting, verdict: verdict{resultRetryable, boom}, want: decision{tried: true, change: change{buried: []failure{{ref: waiting.ref, text: "boom"}}, block: []blocked{{keyRef: key}}}}},
		"head dies, hold": {row: waiting, verdict: verdict{resultRetryable, boom}, hold: true, want: decision{tried: true, change: change{buried: []failure{{ref: waiting.ref, text: "boom"}}, hold: []held{{key, 7}}}}},
	} {
		p := policy{maxAttempts: 5, hold: tc.hold, backoff: func(n int) time.Duration { return time.Duration(n) * time.Second }}
		got := p.decide([]row{tc.row}, []verdict{tc.verdict})
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(decision{}, change{}, failure{}, blocked{}, held{}, found{}, ref{}, keyRef{}), cmp.Comparer(errors.Is)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestAdvanceNeverPassesWhatRemainsOrMayAppear(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		floor := rapid.Int64Range(0, 50).Draw(t, "floor")
		resolved := rapid.Int64Range(0, 100).Draw(t, "resolved")
		var read []row
		var remaining int64
		id := floor
		for range rapid.IntRange(0, 5).Draw(t, "rows") {
			id += rapid.Int64Range(1, 20).Draw(t, "gap")
			read = append(read, row{ref: ref{id: id}})
			if remaining == 0 && rapid.Bool().Draw(t, "stays") {
				remaining = id
			}
		}
		exhausted := rapid.Bool().Draw(t, "exhausted")
		next := advance(floor, resolved, read, remaining, exhausted)
		switch {
		case next < floor:
			t.Fatalf("went back to %d", next)
		case next > floor && next > resolved:
			t.Fatalf("passed what may still appear above %d", resolved)
		case remaining > 0 && next >= remaining:
			t.Fatalf("passed message %d, which is still there", remaining)
		case !exhausted && next > id:
			t.Fatalf("passed %d, above which nothing was read", id)
		}
	})
}

func TestH5_FairLimits(t *testing.T) {
	limits := []int32{25, 25, 25, 25}
	for range 12 {
		got := []int{int(limits[0]), 0, 0, 0}
		fairLimits(limits, got, 100)
	}
	if limits[0] < 90 || limits[1] != 1 {
		t.Errorf("one busy shard: limits %v, want it to get nearly all of 100", limits)
	}
	for range 12 {
		fairLimits(limits, []int{int(limits[0]), int(limits[1]), int(limits[2]), int(limits[3])}, 100)
	}
	sum := 0
	for _, n := range limits {
		sum += int(n)
		if n < 1 {
			t.Errorf("limits %v: a shard gets nothing", limits)
		}
	}
	if sum > 100 {
		t.Errorf("limits %v add up to %d, more than the batch", limits, sum)
	}
}

func TestH8_TheClockThatSaysMoreTimePassedIsBelieved(t *testing.T) {
	cfg := RelayConfig{}.withDefaults()
	start := time.Now()
	l := newLease(cfg, start)
	full := 15*time.Second - 15*time.Millisecond - time.Second
	if left := l.left(start); left != full {
		t.Errorf("at once: %v left, want %v", left, full)
	}
	if left := l.left(start.Add(10 * time.Second)); left != full-10*time.Second {
		t.Errorf("after 10 s: %v left", left)
	}
	l.wall = start.Round(0).Add(-time.Hour) // the machine slept for an hour: the monotonic clock stood still
	if left := l.left(start); left != full-time.Hour {
		t.Errorf("after an hour of sleep: %v left", left)
	}
	l.since, l.wall = start.Add(-time.Hour), start.Round(0) // an hour passed, and somebody set the wall clock back by it
	if left := l.left(start); left != full-time.Hour {
		t.Errorf("after the clock was set back: %v left", left)
	}
	later := start.Add(time.Minute)
	l.renewed(later)
	if left := l.left(later); left != full {
		t.Errorf("renewed: %v left, want %v", left, full)
	}
}

func TestRelayConfigNamesEveryBadField(t *testing.T) {
	err := RelayConfig{Schema: "Bad", Channel: "a\x00b", Lanes: 65, Batch: -1, Lease: 10 * time.Second, Renew: 5 * time.Second, BackoffBase: time.Hour}.withDefaults().check()
	for _, field := range []string{"schema name", "Channel", "Lanes", "Batch", "3·Renew", "BackoffBase"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("the error does not name %s: %v", field, err)
		}
	}
	for _, lease := range []time.Duration{0, time.Second, 3 * time.Second, time.Hour} {
		if err := (RelayConfig{Lease: lease}).withDefaults().check(); err != nil {
			t.Errorf("defaults for a lease of %v: %v", lease, err)
		}
	}
}

func TestHorizonWaitsForEveryOpenWriter(t *testing.T) {
	now := time.Now()
	h := horizon{maxAge: time.Minute}
	at := func(after time.Duration, position int64, open ...string) {
		var writers []writer
		for _, id := range open {
			writers = append(writers, writer{id: id})
		}
		h.observe(now.Add(after), position, writers)
	}
	expect := func(resolved int64) {
		t.Helper()
		if h.resolved != resolved {
			t.Errorf("resolved %d, want %d", h.resolved, resolved)
		}
	}
	at(0, 10)
	expect(10)
	at(1*time.Second, 12, "a", "b")
	expect(10)
	at(2*time.Second, 15, "b", "c") // a has ended, b still may commit 11 or 12
	expect(10)
	at(3*time.Second, 15, "c") // b has ended: 12 is final; 15 waits for c
	expect(12)
	at(4*time.Second, 15)
	expect(15)
}

func TestA1_ALeakedWriterIsPassedAndItsEndIsNoticed(t *testing.T) {
	now := time.Now()
	h := horizon{maxAge: time.Minute}
	open := []writer{{id: "leak", pid: 42}}
	h.observe(now, 5, open)
	if leaked, _ := h.observe(now.Add(59*time.Second), 6, open); len(leaked) != 0 || h.resolved != 0 {
		t.Fatalf("before its time: leaked %v, resolved %d", leaked, h.resolved)
	}
	leaked, _ := h.observe(now.Add(61*time.Second), 7, open)
	if len(leaked) != 1 || leaked[0].pid != 42 || h.resolved != 7 {
		t.Fatalf("after its time: leaked %v, resolved %d, want pid 42 and 7", leaked, h.resolved)
	}
	if leaked, ended := h.observe(now.Add(62*time.Second), 7, open); len(leaked) != 0 || ended {
		t.Errorf("reported again: %v, %v", leaked, ended)
	}
	if _, ended := h.observe(now.Add(63*time.Second), 7, nil); !ended {
		t.Error("its end went unnoticed: what it committed stays below the floors")
	}
}

// The horizon against what really happens: transactions that draw positions, stay open and commit or not.
func TestHorizonIsNeverPassedByACommit(t *testing.T) {
	type tx struct {
		name  string
		drawn []int64
	}
	rapid.Check(t, func(t *rapid.T) {
		h := horizon{maxAge: time.Hour}
		now := time.Now()
		var open []tx
		var position int64
		for step := range rapid.IntRange(1, 60).Draw(t, "steps") {
			now = now.Add(time.Millisecond)
			pick := func() int { return rapid.IntRange(0, len(open)-1).Draw(t, "transaction") }
			switch what := rapid.IntRange(0, 3).Draw(t, "what"); {
			case what == 0:
				open = append(open, tx{name: fmt.Sprint(step)})
			case what == 1 && len(open) > 0:
				position++
				i := pick()
				open[i].drawn = append(open[i].drawn, position)
			case what == 2 && len(open) > 0:
				i := pick()
				for _, p := range open[i].drawn {
					if p <= h.resolved {
						t.Fatalf("position %d committed below the resolved %d", p, h.resolved)
					}
				}
				open = slices.Delete(open, i, i+1)
			case what == 3:
				var writers []writer
				for _, x := range open {
					writers = append(writers, writer{id: x.name})
				}
				h.observe(now, position, writers)
			}
		}
	})
}

func TestKindOf(t *testing.T) {
	boom := errors.New("boom")
	for want, err := range map[result]error{
		resultOK: nil, resultRetryable: boom, resultPermanent: fmt.Errorf("x: %w", Permanent(boom)),
		resultUnavailable: Unavailable(boom), resultNotTried: fmt.Errorf("x: %w", ErrNotTried),
	} {
		if got := kindOf(err); got != want {
			t.Errorf("%v is %v, want %v", err, got, want)
		}
		if err != nil && want != resultNotTried && !errors.Is(err, boom) {
			t.Errorf("%v hides its cause", err)
		}
	}
}

// A slow rate waits between its steps, where it can be stopped; no rate is too high.
func TestOperatorRates(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	started := time.Now()
	done, err := atRate(ctx, 1, false, func(int) (int, error) { return 1, nil })
	if !errors.Is(err, context.DeadlineExceeded) || done != 0 || time.Since(started) > 700*time.Millisecond {
		t.Errorf("one per second: %d done, stopped after %v, %v", done, time.Since(started), err)
	}
	left := 3 * stepMax
	done, err = atRate(t.Context(), math.MaxInt, false, func(atMost int) (int, error) {
		time.Sleep(300 * time.Millisecond)
		n := min(left, atMost)
		left -= n
		return n, nil
	})
	if err != nil || done != 3*stepMax {
		t.Errorf("as fast as can be: %d done, %v", done, err)
	}
}

func TestAnAnswerThatIsThereIsNotOverdue(t *testing.T) {
	t.Parallel()
	for range 64 {
		answer, overdue := make(chan []error, 1), make(chan time.Time, 1)
		overdue <- time.Now()
		if _, ok := answered(answer, overdue); ok {
			t.Fatal("an answer that is not there")
		}
		answer <- nil
		overdue <- time.Now()
		if _, ok := answered(answer, overdue); !ok {
			t.Fatal("the answer is there")
		}
	}
}
