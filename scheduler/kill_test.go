package scheduler_test

import (
	"context"
	"log/slog"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/scheduler"
)

func init() {
	children["scheduler"] = func(ctx context.Context, pool *pgxpool.Pool) error {
		s, err := scheduler.New(pool, longJobs(func(ctx context.Context, tick scheduler.Tick) error {
			if _, err := pool.Exec(ctx, "insert into begun values ($1, $2)", tick.Job, tick.Run); err != nil {
				return err
			}
			<-ctx.Done() // until it is killed
			_, err := pool.Exec(context.WithoutCancel(ctx), "insert into stopped values ($1, $2)", tick.Job, context.Cause(ctx).Error())
			return err
		}), fast("child"))
		if err != nil {
			return err
		}
		return s.Run(ctx)
	}
}

func fast(owner string) scheduler.Config {
	return scheduler.Config{Owner: owner, Lease: time.Second, Poll: 50 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)}
}

// longJobs come due by hand only.
func longJobs(run func(context.Context, scheduler.Tick) error) []scheduler.Job {
	return []scheduler.Job{
		{Name: "once", Spec: "0 0 1 1 *", Run: run},
		{Name: "catches up", Spec: "0 0 1 1 *", CatchUp: true, Run: run},
	}
}

const makeDue = `update commitbox.schedule_job set next_tick_at = clock_timestamp(), due_at = clock_timestamp() where name = $1`

// statuses returns the rows by name.
func statuses(t *testing.T, s *scheduler.Scheduler) map[string]scheduler.Status {
	t.Helper()
	list, err := s.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	by := map[string]scheduler.Status{}
	for _, s := range list {
		by[s.Name] = s
	}
	return by
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("did not come: %s", what)
		}
	}
}

func count(t *testing.T, db *testenv.DB, table string) (n int) {
	t.Helper()
	if err := db.Pool.QueryRow(t.Context(), "select count(*) from "+table).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// busyChild is a process in the middle of a run of both jobs.
func busyChild(t *testing.T) (db *testenv.DB, child process) {
	t.Helper()
	db = testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), "create table begun (job text, run bigint); create table stopped (job text, cause text)"); err != nil {
		t.Fatal(err)
	}
	child = startChild(t, "scheduler", db)
	until(t, "the child's rows", func() bool { return count(t, db, "commitbox.schedule_job") == 2 })
	for _, job := range []string{"once", "catches up"} {
		if _, err := db.Pool.Exec(t.Context(), makeDue, job); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "the child's runs", func() bool { return count(t, db, "begun") == 2 })
	return db, child
}

// A process is killed in the middle of a run. Its run is shown as died once its lease has ended, the next tick runs
// elsewhere, and the tick of a job that catches up is run again.
func TestB51_AKilledProcessIsReplaced(t *testing.T) {
	t.Parallel()
	db, child := busyChild(t)
	var runs atomic.Int64
	attempts := make(chan int, 10)
	s, err := scheduler.New(db.Pool, longJobs(func(_ context.Context, tick scheduler.Tick) error {
		runs.Add(1)
		if tick.Job == "catches up" {
			attempts <- tick.Attempt
		}
		return nil
	}), fast("parent"))
	if err != nil {
		t.Fatal(err)
	}
	if n, err := s.RunOnce(t.Context()); n != 0 || err != nil {
		t.Errorf("while the child runs: %d, %v", n, err)
	}
	child.kill()
	killed := time.Now()
	until(t, "the status died", func() bool { return statuses(t, s)["once"].Outcome == "died" })
	if waited := time.Since(killed); waited > 5*time.Second {
		t.Errorf("a lease of 1 s ended after %v", waited)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	select {
	case attempt := <-attempts:
		if attempt != 2 {
			t.Errorf("attempt %d", attempt)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the tick of the job that catches up was not run again")
	}
	until(t, "the death in the row", func() bool {
		s := statuses(t, s)["once"]
		return s.Failures == 1 && s.Owner == "child" && !s.FinishedAt.IsZero()
	})
	if n := runs.Load(); n != 1 {
		t.Errorf("%d runs, one tick was not to be run again", n)
	}
	if _, err := db.Pool.Exec(t.Context(), makeDue, "once"); err != nil {
		t.Fatal(err)
	}
	until(t, "the next tick", func() bool {
		s := statuses(t, s)["once"]
		return s.Outcome == "succeeded" && s.Runs == 2 && s.Owner == "parent"
	})
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A process that stands still past its lease finds its run stopped when it goes on, and changes nothing.
func TestAStoppedProcessIsFenced(t *testing.T) {
	t.Parallel()
	db, child := busyChild(t)
	child.signal(syscall.SIGSTOP)
	s, err := scheduler.New(db.Pool, longJobs(func(context.Context, scheduler.Tick) error { return nil }), fast("parent"))
	if err != nil {
		t.Fatal(err)
	}
	until(t, "the child's death", func() bool {
		if _, err := s.RunOnce(t.Context()); err != nil {
			t.Fatal(err)
		}
		by := statuses(t, s)
		return by["once"].Outcome == "died" && by["catches up"].Outcome == "succeeded"
	})
	before := statuses(t, s)
	child.signal(syscall.SIGCONT)
	until(t, "the end of the child's runs", func() bool { return count(t, db, "stopped") == 2 })
	time.Sleep(100 * time.Millisecond)
	for name, after := range statuses(t, s) {
		if b := before[name]; b.Runs != after.Runs || b.Outcome != after.Outcome || b.Failures != after.Failures || !b.FinishedAt.Equal(after.FinishedAt) {
			t.Errorf("%+v became %+v", b, after)
		}
	}
}
