package scheduler

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
)

// unsound is an error that panics when it is asked.
type unsound struct{}

func (unsound) Error() string      { panic("no text") }
func (unsound) Is(error) bool      { panic("no identity") }
func (unsound) Unwrap() error      { panic("no cause") }
func (unsound) As(target any) bool { panic("no type") }

var none any

func writeTo(m map[int]int) { m[1] = 1 }

// Whatever a job does, the process lives, the outcome is kept, its own later ticks run, and other jobs run on time.
func TestB73_NoJobEndsTheProcess(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	type outcome struct{ outcome, text string }
	never := make(chan struct{})
	t.Cleanup(func() { close(never) })
	functions := map[string]func(context.Context, Tick) error{
		"panic":         func(context.Context, Tick) error { panic("boom") },
		"panic nil":     func(context.Context, Tick) error { panic(none) },
		"goexit":        func(context.Context, Tick) error { runtime.Goexit(); return nil },
		"error":         func(context.Context, Tick) error { return errors.New("no\x00good\xff") },
		"long error":    func(context.Context, Tick) error { return errors.New(strings.Repeat("ä", 2000)) },
		"unsound error": func(context.Context, Tick) error { return unsound{} },
		"panic unsound": func(context.Context, Tick) error { panic(unsound{}) },
		"nil map":       func(context.Context, Tick) error { writeTo(nil); return nil },
		"hang":          func(context.Context, Tick) error { <-never; return nil },
		"late":          func(ctx context.Context, _ Tick) error { <-ctx.Done(); return ctx.Err() },
	}
	want := map[string]outcome{
		"panic": {panicked, "the job panicked: boom"}, "panic nil": {panicked, "the job panicked: panic called with nil"}, "goexit": {panicked, "the job ended its goroutine"},
		"error": {failed, "no\uFFFDgood\uFFFD"}, "long error": {failed, strings.Repeat("ä", 500)}, "unsound error": {panicked, "the job panicked: no text"},
		"panic unsound": {panicked, "PANIC"}, "nil map": {panicked, "nil map"}, "hang": {hung, "did not return"}, "late": {timedOut, "deadline exceeded"},
	}
	var healthy atomic.Int64
	jobs := []Job{{Name: "healthy", Spec: "@every 100ms", Run: counting(&healthy)}}
	for name, fn := range functions {
		jobs = append(jobs, Job{Name: name, Spec: "@every 100ms", Timeout: 150 * time.Millisecond, Run: fn})
	}
	var seen counts
	cfg := quiet()
	cfg.Observer = &seen
	s, stop := running(t, db, cfg, jobs...)
	for name, w := range want {
		eventually(t, "two runs of "+name, func() bool { s := statusOf(t, s, name); return s.Failures >= 2 })
		eventually(t, "the outcome of "+name, func() bool {
			s := statusOf(t, s, name)
			return s.Outcome == w.outcome && strings.Contains(s.Error, w.text)
		})
		if seen.get("commitbox_scheduler_runs "+name+" "+w.outcome) < 2 {
			t.Errorf("%s is not counted", name)
		}
	}
	before := healthy.Load()
	eventually(t, "more healthy runs", func() bool { return healthy.Load() >= before+3 })
	eventually(t, "the bound of runs left behind", func() bool { return statusOf(t, s, "hang").Runs == leftMax })
	time.Sleep(300 * time.Millisecond)
	if got := statusOf(t, s, "hang").Runs; got != leftMax {
		t.Errorf("%d runs of a job that hangs in one process", got)
	}
	if err := stop(); err == nil || !strings.Contains(err.Error(), "have not returned: hang") {
		t.Errorf("stop: %v", err)
	}
}

// A run that was left behind does not keep other processes from the job.
func TestAHungRunIsForOtherProcesses(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	never := make(chan struct{})
	t.Cleanup(func() { close(never) })
	var elsewhere atomic.Int64
	hanging := Job{Name: "j", Spec: yearly, Timeout: 50 * time.Millisecond, Run: func(context.Context, Tick) error { <-never; return nil }}
	healthy := hanging
	healthy.Run = counting(&elsewhere)
	a, b := replica(t, db, quiet(), hanging), replica(t, db, quiet(), healthy)
	a.step(t)
	due(t, db, "j", 0)
	a.step(t)
	due(t, db, "j", 0)
	b.step(t)
	if s := statusOf(t, a.Scheduler, "j"); elsewhere.Load() != 1 || s.Outcome != succeeded || s.Failures != 1 {
		t.Errorf("%+v", s)
	}
}

// A run whose lease has ended counts as died, at once in the status; what it says afterwards changes nothing.
func TestALateOutcomeIsFenced(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	release, started := make(chan struct{}), make(chan struct{})
	var elsewhere atomic.Int64
	var seen counts
	cfg := quiet()
	cfg.Lease, cfg.Observer = time.Hour, &seen
	slow := Job{Name: "j", Spec: yearly, Run: func(context.Context, Tick) error { close(started); <-release; return nil }}
	healthy := slow
	healthy.Run = counting(&elsewhere)
	a, b := replica(t, db, cfg, slow), replica(t, db, cfg, healthy)
	a.step(t)
	due(t, db, "j", 0)
	if _, err := a.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	receive(t, "the run", started)
	if s := statusOf(t, b.Scheduler, "j"); s.Outcome != "running" || !s.FinishedAt.IsZero() {
		t.Errorf("%+v", s)
	}
	due(t, db, "j", 0)
	b.step(t)
	rows, err := b.read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	stale := rows["j"]
	stale.LeaseUntil = nil // as if it had looked before the claim
	if _, err := b.attend(t.Context(), b.jobs[0], &stale); err != nil {
		t.Error(err)
	}
	if elsewhere.Load() != 0 {
		t.Error("ran while another run had its lease")
	}
	exec(t, db, "update commitbox.schedule_job set lease_until = clock_timestamp()")
	if s := statusOf(t, b.Scheduler, "j"); s.Outcome != died {
		t.Errorf("%+v", s)
	}
	b.step(t)
	if elsewhere.Load() != 1 || seen.get("commitbox_scheduler_runs j died") != 1 {
		t.Errorf("%d runs, %v", elsewhere.Load(), seen.by)
	}
	before := statusOf(t, b.Scheduler, "j")
	close(release)
	<-a.idle()
	if after := statusOf(t, b.Scheduler, "j"); after != before {
		t.Errorf("%+v became %+v", before, after)
	}
	if seen.get("commitbox_scheduler_errors lease_lost") != 1 {
		t.Errorf("%v", seen.by)
	}
}

// throughProxy returns the database behind a proxy.
func throughProxy(t *testing.T, db *testenv.DB) (*testenv.Proxy, *testenv.DB) {
	t.Helper()
	proxy := testenv.NewProxy(t, db.URL)
	pool, err := pgxpool.New(context.Background(), proxy.URL(t, db.URL))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return proxy, &testenv.DB{Name: db.Name, URL: proxy.URL(t, db.URL), Pool: pool}
}

// The loop outlives a database that is away, refuses, or does not answer.
func TestTheLoopOutlivesTheDatabase(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	proxy, behind := throughProxy(t, db)
	var runs atomic.Int64
	var seen counts
	cfg := quiet()
	cfg.Observer = &seen
	_, stop := running(t, behind, cfg, Job{Name: "j", Spec: "@every 100ms", Run: counting(&runs)})
	for range 2 {
		before := runs.Load()
		eventually(t, "runs", func() bool { return runs.Load() >= before+2 })
		errs := seen.get("commitbox_scheduler_errors database")
		proxy.Refuse(true)
		proxy.Cut()
		eventually(t, "errors", func() bool { return seen.get("commitbox_scheduler_errors database") >= errs+2 })
		proxy.Refuse(false)
	}
	before := runs.Load()
	eventually(t, "runs after the database is back", func() bool { return runs.Load() >= before+2 })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// A row that somebody holds, as the open transaction of an operator who pauses a job does, delays no other job, and the loop
// does not spin meanwhile.
func TestARowThatSomebodyHoldsDelaysNoOtherJob(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var held, free atomic.Int64
	_, stop := running(t, db, quiet(), Job{Name: "held", Spec: "@every 100ms", Run: counting(&held)}, Job{Name: "free", Spec: "@every 100ms", Run: counting(&free)})
	lone := replica(t, db, quiet(), Job{Name: "lone", Spec: yearly, CatchUp: true, Run: nothing})
	lone.step(t)
	due(t, db, "lone", time.Hour)
	eventually(t, "the first runs", func() bool { return held.Load() > 0 && free.Load() > 0 })
	operator, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer operator.Rollback(context.Background())
	if _, err := operator.Exec(t.Context(), `select commitbox.schedule_pause('held'), commitbox.schedule_pause('lone')`); err != nil {
		t.Fatal(err)
	}
	before, start := free.Load(), time.Now()
	eventually(t, "ten more runs of the other job", func() bool { return free.Load() >= before+10 })
	if took := time.Since(start); took > 2*statementLimit {
		t.Errorf("ten runs, 100 ms apart, took %v", took)
	}
	if wait, err := lone.look(t.Context()); wait <= 0 || err != nil {
		t.Errorf("looks again after %v, %v", wait, err)
	}
	before = held.Load()
	operator.Rollback(t.Context())
	eventually(t, "runs of the job that was held", func() bool { return held.Load() > before })
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// The answer to a claim is lost. The tick is not run, as nobody knows that it is theirs, and shown as died once the lease has
// ended; a job that catches up runs it then.
func TestALostAnswerToAClaimIsShown(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	proxy, behind := throughProxy(t, db)
	behind.URL += "&default_query_exec_mode=exec" // a statement is one message
	pool, err := pgxpool.New(t.Context(), behind.URL)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	behind.Pool = pool
	var runs atomic.Int64
	attempt := 0
	once := Job{Name: "once", Spec: yearly, Run: counting(&runs)}
	catches := Job{Name: "catches up", Spec: yearly, CatchUp: true, Run: func(_ context.Context, tick Tick) error { attempt = tick.Attempt; return nil }}
	for _, job := range []Job{once, catches} {
		e := replica(t, behind, quiet(), job)
		e.step(t)
		due(t, db, job.Name, 0)
		cut := proxy.CutAfter("ScheduleClaim")
		if _, err := e.look(t.Context()); err == nil {
			t.Error("no error of a look that lost its answer")
		}
		receive(t, "the cut", cut)
		<-e.idle()
		if s := statusOf(t, e.Scheduler, job.Name); s.Runs != 1 || s.Outcome != "running" || runs.Load() != 0 || attempt != 0 {
			t.Errorf("%+v", s)
		}
		eventually(t, "the death of the run", func() bool { return statusOf(t, e.Scheduler, job.Name).Outcome == died })
		e.step(t)
		e.step(t)
	}
	if runs.Load() != 0 || attempt != 2 {
		t.Errorf("%d runs, attempt %d of the job that catches up", runs.Load(), attempt)
	}
}

// A run that cannot renew is told to stop before its lease ends; another process takes over after it.
func TestARunWithoutItsLeaseIsStopped(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	proxy, behind := throughProxy(t, db)
	cause, started := make(chan error, 1), make(chan struct{})
	var elsewhere atomic.Int64
	job := Job{Name: "j", Spec: yearly, CatchUp: true, Run: func(ctx context.Context, _ Tick) error {
		close(started)
		<-ctx.Done()
		cause <- context.Cause(ctx)
		return ctx.Err()
	}}
	a := replica(t, behind, quiet(), job)
	job.Run = func(_ context.Context, tick Tick) error {
		elsewhere.Store(int64(tick.Attempt))
		return nil
	}
	a.step(t)
	due(t, db, "j", 0)
	if _, err := a.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	receive(t, "the run", started)
	time.Sleep(1500 * time.Millisecond) // longer than the lease: it is renewed
	if s := statusOf(t, &Scheduler{pool: db.Pool}, "j"); s.Outcome != "running" {
		t.Fatalf("%+v", s)
	}
	proxy.BlackHole(testenv.ToServer)
	proxy.BlackHole(testenv.ToClient)
	_, stop := running(t, db, quiet(), job)
	if err := receive(t, "the cause", cause); !errors.Is(err, errLeaseLost) {
		t.Errorf("cause %v", err)
	}
	if elsewhere.Load() != 0 {
		t.Error("the other process did not wait for the lease")
	}
	eventually(t, "the second run of the tick", func() bool { return elsewhere.Load() == 2 })
	if err := stop(); err != nil {
		t.Error(err)
	}
	proxy.Heal()
}

// Run lets runs end, tells what takes longer to stop, gives the tick of a job that catches up back, and names what hangs.
func TestP15_Drain(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	never := make(chan struct{})
	t.Cleanup(func() { close(never) })
	var begun atomic.Int64
	cfg := quiet()
	cfg.Drain = 300 * time.Millisecond
	job := func(name string, catchUp bool, fn func(ctx context.Context) error) Job {
		return Job{Name: name, Spec: yearly, CatchUp: catchUp, Run: func(ctx context.Context, _ Tick) error {
			begun.Add(1)
			return fn(ctx)
		}}
	}
	untilTheEnd := func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
	short := func(ctx context.Context) error {
		time.Sleep(150 * time.Millisecond)
		return ctx.Err()
	}
	jobs := []Job{job("short", false, short), job("long", false, untilTheEnd), job("long catches up", true, untilTheEnd), job("hangs", true, func(context.Context) error { <-never; return nil })}
	replica(t, db, cfg, jobs...).step(t)
	for _, j := range jobs {
		due(t, db, j.Name, 0)
	}
	s, stop := running(t, db, cfg, jobs...)
	eventually(t, "four runs", func() bool { return begun.Load() == 4 })
	start := time.Now()
	err := stop()
	if took := time.Since(start); took < 300*time.Millisecond || took > 5*time.Second {
		t.Errorf("drained for %v", took)
	}
	if err == nil || !strings.HasSuffix(err.Error(), "have not returned: hangs") {
		t.Errorf("%v", err)
	}
	for name, want := range map[string]string{"short": succeeded, "long": cancelled, "long catches up": cancelled} {
		if got := statusOf(t, s, name); got.Outcome != want || got.Failures != 0 {
			t.Errorf("%+v", got)
		}
	}
	if statusOf(t, s, "long").DueAt.Before(time.Now().Add(time.Minute)) || statusOf(t, s, "long catches up").DueAt.After(time.Now().Add(time.Minute)) {
		t.Error("which ticks were given back")
	}
	eventually(t, "the end of the lease of what hangs", func() bool { return statusOf(t, s, "hangs").Outcome == died })
}
