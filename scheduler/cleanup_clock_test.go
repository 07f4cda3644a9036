package scheduler

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/commitbox/commitbox/internal/testenv"
)

// A reading whose database is ahead of the process by offset, when so much has passed on the process's clocks.
func at(start time.Time, passed, offset time.Duration) reading {
	process := start.Add(passed) // moves the monotonic reading too
	return reading{process.Round(0).Add(offset), process}
}

func TestClockGuard(t *testing.T) {
	t.Parallel()
	start := time.Now()
	for _, c := range []struct {
		name      string
		before    []reading
		now       reading
		confirmed bool // the reading before
		refused   string
	}{
		{"same", nil, at(start, 0, 0), false, ""},
		{"an hour off", nil, at(start, 0, time.Hour), false, ""},
		{"ahead", nil, at(start, 0, time.Hour+time.Second), false, "1h0m1s off"},
		{"behind", nil, at(start, 0, -25*time.Hour), false, "-25h0m0s off"},
		{"a slow drift", []reading{at(start, 0, 0)}, at(start, time.Hour, 4*time.Minute), false, ""},
		{"a leap", []reading{at(start, 0, 0)}, at(start, time.Hour, 6*time.Minute), false, "leapt by 6m0s"},
		{"a leap back", []reading{at(start, 0, 0)}, at(start, time.Hour, -50*time.Minute), false, ""},
		{"still the same leap", []reading{at(start, 0, 0), at(start, time.Hour, 6*time.Minute)}, at(start, 2*time.Hour, 6*time.Minute), false, "leapt"},
		{"the leap is undone", []reading{at(start, 0, 0), at(start, time.Hour, 6*time.Minute)}, at(start, 2*time.Hour, 0), false, ""},
		{"a leap, confirmed", []reading{at(start, 0, 0), at(start, time.Hour, 6*time.Minute)}, at(start, 2*time.Hour, 6*time.Minute), true, ""},
		{"ahead, confirmed", []reading{at(start, 0, 9*time.Hour)}, at(start, time.Hour, 9*time.Hour), true, ""},
		{"ahead, confirmed, set right", []reading{at(start, 0, 9*time.Hour)}, at(start, time.Hour, 0), true, ""},
		{"ahead, confirmed, further ahead", []reading{at(start, 0, 9*time.Hour)}, at(start, time.Hour, 11*time.Hour), true, "11h0m0s off|leapt"},
		{"the process slept: its monotonic clock stood still", []reading{at(start, 0, 0)}, reading{start.Round(0).Add(8 * time.Hour), start.Add(time.Second)}, false, "leapt"},
	} {
		var g clockGuard
		for _, before := range c.before {
			_ = g.admit(before)
			if c.confirmed {
				g.confirm(before)
			}
		}
		err := g.admit(c.now)
		var refusal *ClockError
		switch refused := errors.As(err, &refusal); {
		case refused != (c.refused != ""):
			t.Errorf("%s: %v", c.name, err)
		case refused && !containsAny(err.Error(), c.refused):
			t.Errorf("%s: %v does not tell of %q", c.name, err, c.refused)
		}
	}
}

// The first run of a process has no reading to compare with. What moved the wall clock of its machine, from which the database may have
// its time too, is seen all the same.
func TestClockGuardOfAFirstRun(t *testing.T) {
	t.Parallel()
	start := time.Now()
	for leap, refused := range map[time.Duration]bool{0: false, 4 * time.Minute: false, 6 * time.Minute: true, 30 * 24 * time.Hour: true, -time.Hour: false} {
		g := clockGuard{born: reading{start.Round(0).Add(-leap), start}}
		now := at(start, time.Minute, 0)
		for range 2 {
			if err := g.admit(now); (err != nil) != refused || refused && !strings.Contains(err.Error(), "leapt by "+leap.String()) {
				t.Errorf("a leap by %v: %v", leap, err)
			}
		}
		g.confirm(now)
		if err := g.admit(at(start, time.Hour, 0)); err != nil {
			t.Errorf("a leap by %v, confirmed: %v", leap, err)
		}
	}
}

func containsAny(text, wanted string) bool {
	for want := range strings.SplitSeq(wanted, "|") {
		if strings.Contains(text, want) {
			return true
		}
	}
	return false
}

// old makes one row that is over for a day, and one that will be over in a day.
func old(t *testing.T, skew time.Duration) (*testenv.DB, *Cleanup) {
	t.Helper()
	d := testenv.Database(t)
	_, err := d.Pool.Exec(t.Context(), `insert into commitbox.inbox (consumer, message_id, status, finished_at)
		values ('a', 'old', 'completed', now() - interval '8 days'), ('a', 'new', 'completed', now() - interval '7 days' + interval '5 minutes')`)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewCleanup(d.Pool, CleanupConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	c.now = func() time.Time { return time.Now().Add(skew) }
	return d, c
}

// The process's clock decides nothing: ten minutes fast or slow, the same rows go.
func TestB69_CleanupCountsByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	for _, skew := range []time.Duration{-10 * time.Minute, 0, 10 * time.Minute} {
		_, c := old(t, skew)
		if report, err := c.RunOnce(t.Context()); err != nil || report.Completed != 1 {
			t.Errorf("%v: %+v, %v", skew, report, err)
		}
	}
}

// A database whose clock cannot be believed is left alone until a person has looked.
func TestCleanupRefusesAClockThatItCannotBelieve(t *testing.T) {
	t.Parallel()
	d, c := old(t, -2*time.Hour)
	var seen counts
	c.cfg.Observer = &seen
	for range 2 {
		report, err := c.RunOnce(t.Context())
		var refusal *ClockError
		if !errors.As(err, &refusal) || refusal.Offset < time.Hour || report.Completed != 0 {
			t.Fatalf("%+v, %v", report, err)
		}
	}
	if n := seen.get("commitbox_cleanup_runs refused"); n != 2 {
		t.Errorf("%v refusals are counted", n)
	}
	if err := c.ConfirmClock(t.Context()); err != nil {
		t.Fatal(err)
	}
	if report, err := c.RunOnce(t.Context()); err != nil || report.Completed != 1 {
		t.Errorf("%+v, %v", report, err)
	}
	var left int
	if err := d.Pool.QueryRow(context.Background(), `select count(*) from commitbox.inbox`).Scan(&left); err != nil || left != 1 {
		t.Errorf("%d rows, %v", left, err)
	}
}

// The database's clock leaps between two ticks, though not far from the process's: nothing is removed, and the job's row says why, until
// somebody confirms the clock or it comes back.
func TestB69_ALeapBetweenTicksIsRefused(t *testing.T) {
	t.Parallel()
	db, shift := shifted(t)
	c, err := NewCleanup(db.Pool, CleanupConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	job := c.Job()
	job.Spec, job.Jitter = yearly, 0
	cfg := quiet()
	cfg.Lease = time.Minute
	s, err := New(db.Pool, []Job{job}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.RunOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	tick := func(refused bool) {
		t.Helper()
		exec(t, db, `insert into commitbox.inbox (consumer, message_id, status, finished_at) values ('a', 'old', 'completed', now() - interval '8 days') on conflict do nothing`)
		exec(t, db, `update commitbox.schedule_job set next_tick_at = clock_timestamp(), due_at = clock_timestamp()`) // by the shifted clock
		runs, err := s.RunOnce(t.Context())
		var refusal *ClockError
		if runs != 1 || errors.As(err, &refusal) != refused {
			t.Errorf("%d runs, %v", runs, err)
		}
		var left int
		if err := db.Pool.QueryRow(t.Context(), `select count(*) from commitbox.inbox`).Scan(&left); err != nil || (left == 1) != refused {
			t.Errorf("%d rows, %v", left, err)
		}
		if got := statusOf(t, s, "cleanup"); strings.Contains(got.Error, "leapt by 10m") != refused {
			t.Errorf("%+v", got)
		}
	}
	tick(false)
	shift(10 * time.Minute)
	tick(true)
	tick(true)
	shift(0)
	tick(false)
	shift(10 * time.Minute)
	tick(true)
	if err := c.ConfirmClock(t.Context()); err != nil {
		t.Fatal(err)
	}
	tick(false)
}

// The database's clock may leap in the middle of a run: ages count from its start.
func TestCleanupCountsFromTheStartOfTheRun(t *testing.T) {
	t.Parallel()
	_, c := old(t, 0)
	r := &cleaning{c: c, pool: c.pool, asOf: time.Now().Add(-2 * 24 * time.Hour)}
	if err := r.all(t.Context()); err != nil || r.report.Completed != 0 {
		t.Errorf("%+v, %v", r.report, err)
	}
}

// One leader is for economy. Where several clean up at once, for one lost its lead, they skip each other's rows.
func TestB51_CleanersWithoutALeaderSkipEachOthersRows(t *testing.T) {
	t.Parallel()
	d, c := old(t, 0)
	_, err := d.Pool.Exec(t.Context(), `insert into commitbox.inbox (consumer, message_id, status, finished_at, next_attempt_at, received_at)
		select 'a', n::text, case when n > 500 then 'failed' else 'completed' end,
		       case when n <= 500 then now() - make_interval(days => 8, secs => n) end, case when n > 500 then now() - make_interval(days => 8) end,
		       now() - interval '9 days' from generate_series(1, 1000) n`)
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	cleaners := make([]*cleaning, 6)
	for i := range cleaners {
		c, err := NewCleanup(d.Pool, CleanupConfig{Batch: 10, Pause: time.Microsecond, Logger: c.cfg.Logger})
		if err != nil {
			t.Fatal(err)
		}
		cleaners[i] = &cleaning{c: c, pool: d.Pool, asOf: time.Now()}
		group.Go(func() {
			if err := errors.Join(cleaners[i].all(t.Context()), errors.Join(cleaners[i].errs...)); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	var completed, abandoned int64
	for _, r := range cleaners {
		completed, abandoned = completed+r.report.Completed, abandoned+r.report.Abandoned
	}
	if completed != 501 || abandoned != 500 {
		t.Errorf("%d rows removed, %d abandoned", completed, abandoned)
	}
}

// A run goes on behind its last batch: a row that turns up before it waits for the next run.
func TestB53_ARunGoesOnBehindItsLastBatch(t *testing.T) {
	t.Parallel()
	d, c := old(t, 0)
	r := &cleaning{c: c, pool: d.Pool, asOf: time.Now()}
	task := r.ended("a", kindCompleted, 7*24*60*60)
	for want := range int64(2) {
		done, _, err := r.batch(t.Context(), task)
		if err != nil || done != 1-want {
			t.Errorf("%d rows, %v", done, err)
		}
		if _, err := d.Pool.Exec(t.Context(), `insert into commitbox.inbox (consumer, message_id, status, finished_at)
			values ('a', 'older', 'completed', now() - interval '9 days') on conflict do nothing`); err != nil {
			t.Fatal(err)
		}
	}
}

func TestBatchSize(t *testing.T) {
	t.Parallel()
	s := batchSize{1000, 1000}
	s.after(time.Millisecond)
	if s.rows != 1000 {
		t.Errorf("grew above its limit: %d", s.rows)
	}
	s.after(batchGoal + 1)
	if s.rows != 750 {
		t.Errorf("%d rows after a batch that took too long", s.rows)
	}
	s.after(batchGoal)
	if s.rows != 750 {
		t.Errorf("%d rows after a batch that took just as long as it may", s.rows)
	}
	halvings := 0
	for s.halve() {
		halvings++
	}
	if s.rows != 1 || halvings != 9 {
		t.Errorf("%d rows after %d halvings", s.rows, halvings)
	}
	for range 30 {
		s.after(time.Millisecond)
	}
	if s.rows != 1000 {
		t.Errorf("%d rows: it did not grow back", s.rows)
	}
	s.rows = 1
	s.after(time.Hour)
	if s.rows != 1 {
		t.Errorf("%d rows", s.rows)
	}
}
