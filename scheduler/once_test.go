package scheduler

import (
	"context"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/commitbox/commitbox/internal/testenv"
)

// Ten replicas that look at the same moment run each of a hundred ticks once.
func TestB51_TenReplicasRunAHundredTicksOnce(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var runs atomic.Int64
	job := distinct(t, &runs)
	var replicas []*engine
	for range 10 {
		replicas = append(replicas, replica(t, db, quiet(), job))
	}
	replicas[0].step(t)
	for n := int64(1); n <= 100; n++ {
		due(t, db, "j", 0)
		var group sync.WaitGroup
		for _, e := range replicas {
			group.Go(func() { e.step(t) })
		}
		group.Wait()
		if got := runs.Load(); got != n {
			t.Fatalf("%d runs of %d ticks", got, n)
		}
	}
	if s := statusOf(t, replicas[0].Scheduler, "j"); s.Runs != 100 || s.Failures != 0 || s.Outcome != succeeded || s.Missed != 0 {
		t.Errorf("%+v", s)
	}
}

// distinct is a job whose ticks come due by hand. It counts its runs, and reports a tick that comes twice.
func distinct(t *testing.T, runs *atomic.Int64) Job {
	var seen sync.Map
	return Job{Name: "j", Spec: yearly, Run: func(_ context.Context, tick Tick) error {
		runs.Add(1)
		if _, twice := seen.LoadOrStore(tick.At.UnixMicro(), true); twice {
			t.Errorf("tick %v ran twice", tick.At)
		}
		if _, twice := seen.LoadOrStore(tick.Run, true); twice {
			t.Errorf("two runs have number %d", tick.Run)
		}
		return nil
	}}
}

// Ten schedulers in their loops, in one database and with one spec, run a hundred ticks a hundred times.
func TestB51_TenSchedulersRunAHundredTicksOnce(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var runs atomic.Int64
	cfg := quiet()
	cfg.Poll, cfg.Lease = 20*time.Millisecond, time.Minute
	job := distinct(t, &runs)
	var stops []func() error
	var s *Scheduler
	for range 10 {
		var stop func() error
		s, stop = running(t, db, cfg, job)
		stops = append(stops, stop)
	}
	eventually(t, "the job's row", func() bool { return statusOf(t, s, "j").Name == "j" })
	for n := int64(1); n <= 100; n++ {
		due(t, db, "j", 0)
		eventually(t, "the run", func() bool { return runs.Load() >= n && statusOf(t, s, "j").Outcome == succeeded })
	}
	for _, stop := range stops {
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
	if s := statusOf(t, s, "j"); runs.Load() != 100 || s.Runs != 100 || s.Failures != 0 || s.Missed != 0 {
		t.Errorf("%d runs, %+v", runs.Load(), s)
	}
}

// Ten loops share an interval: every run is of another tick, no two are closer than the interval, and the row counts them
// all.
func TestTenLoopsShareAnInterval(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var mu sync.Mutex
	var ticks []time.Time
	job := Job{Name: "j", Spec: "@every 100ms", Run: func(_ context.Context, tick Tick) error {
		mu.Lock()
		defer mu.Unlock()
		ticks = append(ticks, tick.At)
		return nil
	}}
	var stops []func() error
	var s *Scheduler
	for range 10 {
		var stop func() error
		s, stop = running(t, db, quiet(), job)
		stops = append(stops, stop)
	}
	eventually(t, "15 ticks", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(ticks) >= 15
	})
	for _, stop := range stops {
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
	for i := 1; i < len(ticks); i++ {
		if d := ticks[i].Sub(ticks[i-1]); d < 100*time.Millisecond {
			t.Errorf("ticks %d and %d are %v apart", i-1, i, d)
		}
	}
	if got := statusOf(t, s, "j").Runs; got != int64(len(ticks)) {
		t.Errorf("the row counts %d runs, there were %d", got, len(ticks))
	}
}

// A job whose interval is longer than its process lives runs all the same, and a pause is caught up with once. The unit is
// a second in the long form.
func TestB74_IntervalLongerThanTheProcessLives(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	unit := 100 * time.Millisecond
	if os.Getenv("COMMITBOX_SOAK") != "" {
		unit = time.Second
	}
	var runs atomic.Int64
	job := Job{Name: "j", Spec: "@every " + (10 * unit).String(), Run: counting(&runs)}
	var s *Scheduler
	start := time.Now()
	for time.Since(start) < 45*unit {
		var stop func() error
		s, stop = running(t, db, quiet(), job)
		time.Sleep(3 * unit)
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
	if got, most := runs.Load(), int64(time.Since(start)/(10*unit)); got < 3 || got > most {
		t.Errorf("%d runs in %v", got, time.Since(start))
	}
	due(t, db, "j", 60*unit)
	before := runs.Load()
	_, stop := running(t, db, quiet(), job)
	eventually(t, "the run that catches up", func() bool { return runs.Load() > before })
	time.Sleep(3 * unit)
	if err := stop(); err != nil {
		t.Error(err)
	}
	if got := runs.Load() - before; got != 1 {
		t.Errorf("%d runs after a pause of six intervals", got)
	}
	if next := time.Until(statusOf(t, s, "j").NextAt); next < unit {
		t.Errorf("the next tick is in %v", next)
	}
}

// A tick of a cron line that nobody was there for runs once if the job asks for it, or is counted as missed.
func TestMissedTick(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var catching, other atomic.Int64
	var seen counts
	cfg := quiet()
	cfg.Observer = &seen
	jobs := []Job{{Name: "catches up", Spec: "* * * * *", CatchUp: true, Run: counting(&catching)}, {Name: "other", Spec: yearly, Run: counting(&other)}}
	replica(t, db, cfg, jobs...).step(t)
	due(t, db, "catches up", 6*time.Hour)
	due(t, db, "other", 61*time.Second)
	e := replica(t, db, cfg, jobs...) // all were down, and this is the first that starts
	e.step(t)
	e.step(t)
	if catching.Load() != 1 || other.Load() != 0 {
		t.Errorf("%d and %d runs", catching.Load(), other.Load())
	}
	if s := statusOf(t, e.Scheduler, "other"); s.Missed != 1 || s.Runs != 0 || s.Outcome != "" || time.Until(s.NextAt) < 0 {
		t.Errorf("%+v", s)
	}
	if seen.get("commitbox_scheduler_missed other") != 1 || seen.get("commitbox_scheduler_missed catches up") != 0 {
		t.Errorf("%v", seen.by)
	}
	due(t, db, "other", 30*time.Second)
	e.step(t)
	if other.Load() != 1 {
		t.Error("a tick that is a little late did not run")
	}
}

// While a job runs its ticks wait: one of them runs afterwards.
func TestTicksDuringARunAreOneRun(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var runs, both atomic.Int64
	job := Job{Name: "j", Spec: "@every 100ms", Run: func(context.Context, Tick) error {
		if both.Add(1) > 1 {
			t.Error("two runs at once")
		}
		time.Sleep(350 * time.Millisecond)
		both.Add(-1)
		runs.Add(1)
		return nil
	}}
	start := time.Now()
	s, stop := running(t, db, quiet(), job)
	_, other := running(t, db, quiet(), job)
	eventually(t, "three runs", func() bool { return runs.Load() >= 3 })
	if took := time.Since(start); took < 1150*time.Millisecond {
		t.Errorf("three runs of 350 ms in %v", took)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if err := other(); err != nil {
		t.Error(err)
	}
	if got := statusOf(t, s, "j"); got.Duration < 300*time.Millisecond || got.Duration > 10*time.Second {
		t.Errorf("duration %v", got.Duration)
	}
}

// The step alone does what is due and says what came of it.
func TestRunOnce(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var runs atomic.Int64
	s, err := New(db.Pool, []Job{{Name: "j", Spec: yearly, Run: counting(&runs)}, {Name: "fails", Spec: yearly, Run: func(context.Context, Tick) error { return context.Canceled }}}, quiet())
	if err != nil {
		t.Fatal(err)
	}
	if n, err := s.RunOnce(t.Context()); n != 0 || err != nil {
		t.Errorf("nothing is due: %d, %v", n, err)
	}
	due(t, db, "j", 0)
	if n, err := s.RunOnce(t.Context()); n != 1 || err != nil || runs.Load() != 1 {
		t.Errorf("%d, %v", n, err)
	}
	due(t, db, "fails", 0)
	if n, err := s.RunOnce(t.Context()); n != 1 || err == nil || err.Error() != "scheduler: run 1 of job fails: failed: context canceled" {
		t.Errorf("%d, %v", n, err)
	}
	due(t, db, "j", 0)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if n, err := s.RunOnce(ended); n != 0 || err == nil {
		t.Errorf("%d, %v", n, err)
	}
}

// A paused job has no ticks; both acts are in the audit.
func TestPause(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var runs atomic.Int64
	e := replica(t, db, quiet(), Job{Name: "j", Spec: yearly, CatchUp: true, Run: counting(&runs)})
	e.step(t)
	call := func(function string, job string) (found bool) {
		if err := db.Pool.QueryRow(t.Context(), "select commitbox."+function+"($1, 'why')", job).Scan(&found); err != nil {
			t.Fatal(err)
		}
		return found
	}
	if !call("schedule_pause", "j") || call("schedule_pause", "unknown") {
		t.Error("which jobs there are")
	}
	due(t, db, "j", time.Hour)
	e.step(t)
	if runs.Load() != 0 || !statusOf(t, e.Scheduler, "j").Paused {
		t.Error("it runs")
	}
	if !call("schedule_resume", "j") || call("schedule_resume", "unknown") {
		t.Error("which jobs there are")
	}
	e.step(t)
	if runs.Load() != 1 {
		t.Errorf("%d runs", runs.Load())
	}
	var audit int
	if err := db.Pool.QueryRow(t.Context(), "select count(*) from commitbox.audit where target = 'j' and reason = 'why'").Scan(&audit); err != nil || audit != 2 {
		t.Errorf("%d audit rows, %v", audit, err)
	}
}
