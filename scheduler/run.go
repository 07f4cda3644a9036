package scheduler

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
)

// How a run ended; the values of the column and of the metric's label.
const (
	succeeded = "succeeded"
	failed    = "failed"
	panicked  = "panicked"
	timedOut  = "timed_out"
	hung      = "hung"      // it did not return within Config.Grace after its context ended
	died      = "died"      // its lease ended
	cancelled = "cancelled" // the process stopped, and it came back with an error
)

// attemptsMax bounds the runs of one tick: a job that kills its process must not do so for ever.
const attemptsMax = 3

const errorMax = 1000

// PanicError is the error of a run that panicked or called runtime.Goexit.
type PanicError struct {
	Value any    // nil after runtime.Goexit
	Stack []byte // of the panic
}

func (e *PanicError) Error() string {
	if e.Value == nil {
		return "the job ended its goroutine"
	}
	return fmt.Sprintf("the job panicked: %v", e.Value)
}

// run is one run of a job.
type run struct {
	*engine
	job     *job
	tick    Tick
	claimed time.Time // when the claim was sent: the lease is not older
}

// do runs the job, and keeps the lease until the outcome is written.
func (r *run) do() {
	start := time.Now()
	ctx, cancel := context.WithCancelCause(r.base)
	defer cancel(nil)
	fuse := time.AfterFunc(time.Until(r.claimed.Add(r.cfg.safe())), func() { cancel(errLeaseLost) })
	defer fuse.Stop()
	kept, stopKeeping := context.WithCancel(context.WithoutCancel(ctx))
	keeping := make(chan struct{})
	go func() {
		defer close(keeping)
		r.keep(kept, fuse, cancel)
	}()

	limited, release := context.WithTimeout(ctx, r.job.Timeout)
	got, back := r.call(limited)
	outcome := outcomeOf(got, back, context.Cause(limited))
	release()
	r.report(outcome, got, time.Since(start))
	switch {
	case outcome == hung && errors.Is(context.Cause(ctx), errStopping):
		// Still at work, until the process ends; the lease tells others when.
	case outcome != died: // that is for whoever sees the end of the lease
		r.finish(outcome, got.text)
	}
	stopKeeping()
	<-keeping
	r.ended(r.job, failure(r.tick, outcome, got.err))
}

// failure is what RunOnce returns for a run.
func failure(tick Tick, outcome string, err error) error {
	if outcome == succeeded {
		return nil
	}
	if err == nil {
		return fmt.Errorf("scheduler: run %d of job %s: %s", tick.Run, tick.Job, outcome)
	}
	return fmt.Errorf("scheduler: run %d of job %s: %s: %w", tick.Run, tick.Job, outcome, err)
}

// result is what the user's function said. Its text is made beside the function, because an error's method may panic too.
type result struct {
	err      error
	text     string
	panicked bool
}

// call runs the user's function and waits for it, but only for Grace after its context has ended.
func (r *run) call(ctx context.Context) (got result, back bool) {
	done := guarded(ctx, r.job.Run, r.tick)
	select {
	case got := <-done:
		return got, true
	case <-ctx.Done():
	}
	grace := time.NewTimer(r.cfg.Grace)
	defer grace.Stop()
	select {
	case got := <-done:
		return got, true
	case <-grace.C:
	}
	r.leave(r.job, 1)
	go func() {
		<-done
		r.leave(r.job, -1)
	}()
	return result{text: "it did not return after its context had ended"}, false
}

// guarded runs fn in a goroutine of its own and turns a panic, and the end of the goroutine, into an error.
func guarded(ctx context.Context, fn func(context.Context, Tick) error, tick Tick) <-chan result {
	done := make(chan result, 1)
	go func() {
		var got result
		returned := false
		defer func() {
			if value := recover(); value != nil || !returned {
				failure := &PanicError{Value: value, Stack: debug.Stack()}
				got = result{err: failure, text: failure.Error(), panicked: true}
			}
			done <- got
		}()
		if got.err = fn(ctx, tick); got.err != nil {
			got.text = got.err.Error()
		}
		returned = true
	}()
	return done
}

// outcomeOf is pure. It asks the error nothing: its methods are the user's.
func outcomeOf(got result, back bool, cause error) string {
	switch {
	case !back:
		return hung
	case got.panicked:
		return panicked
	case got.err == nil:
		return succeeded
	case errors.Is(cause, errStopping):
		return cancelled
	case errors.Is(cause, errLeaseLost):
		return died
	case errors.Is(cause, context.DeadlineExceeded):
		return timedOut
	}
	return failed
}

// safe is how long after its renewal a lease may be relied on.
func (c *Config) safe() time.Duration { return c.Lease * 9 / 10 }

// keep renews the lease until ctx ends. When it is lost, or could not be renewed in time, the run is told to stop.
func (r *run) keep(ctx context.Context, fuse *time.Timer, cancel context.CancelCauseFunc) {
	for sleep(ctx, r.cfg.Lease/3) {
		sent := time.Now()
		limited, release := context.WithTimeout(ctx, min(statementLimit, r.cfg.Lease/3))
		n, err := r.queries.ScheduleRenew(limited, db.ScheduleRenewParams{Name: r.job.Name, Run: r.tick.Run, LeaseSeconds: r.cfg.Lease.Seconds()})
		release()
		switch {
		case err == nil && n == 0:
			cancel(errLeaseLost)
			return
		case err == nil:
			fuse.Reset(time.Until(sent.Add(r.cfg.safe())))
		case ctx.Err() == nil:
			r.lostTouch(err, r.cfg.Lease/3)
		}
	}
}

// finish writes the outcome, and tries again for as long as a lease lasts: after that the run is seen as died.
func (r *run) finish(outcome, text string) {
	record := db.ScheduleFinishParams{
		Name: r.job.Name, Run: r.tick.Run, Outcome: outcome, Error: pgtype.Text{String: check.Clean(text, errorMax), Valid: text != ""},
		GiveBack: r.job.CatchUp && outcome == cancelled, AttemptsMax: attemptsMax,
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.base), r.cfg.Lease)
	defer cancel()
	for failures := 1; ; failures++ {
		limited, release := context.WithTimeout(ctx, statementLimit)
		n, err := r.queries.ScheduleFinish(limited, record)
		release()
		if err == nil {
			if n == 0 && failures == 1 {
				r.fenced(outcome)
			}
			return
		}
		pause := retryDelay(failures, time.Second, r.cfg.random)
		r.lostTouch(err, pause)
		if !sleep(ctx, pause) {
			return
		}
	}
}

func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// retryDelay is a capped exponential backoff with jitter, from 100 ms.
func retryDelay(failures int, most time.Duration, random func() float64) time.Duration {
	ceiling := min(most, 100*time.Millisecond<<min(failures-1, 10))
	return ceiling/2 + time.Duration(random()*float64(ceiling/2))
}
