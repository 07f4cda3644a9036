package scheduler

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
)

// careful keeps a panic of the user's observer from ending the process or a run.
type careful struct {
	to  commitbox.Observer
	log *slog.Logger
}

// Observe implements commitbox.Observer.
func (c careful) Observe(m *commitbox.Metric, value float64, labels ...string) {
	defer func() {
		if p := recover(); p != nil {
			c.log.Error("scheduler: the observer panicked", "metric", m.Name, "error", fmt.Sprint(p), "stack", string(debug.Stack()))
		}
	}()
	c.to.Observe(m, value, labels...)
}

// lostTouch counts and logs an error of the scheduler's own statements. The pauses after errors bound how often.
func (e *engine) lostTouch(err error, wait time.Duration) {
	e.cfg.Observer.Observe(commitbox.SchedulerErrors, 1, "database")
	e.cfg.Logger.Error("scheduler: lost touch with the database and tries again", "owner", e.cfg.Owner, "error", err, "in", wait)
}

// report counts and logs the end of a run; a death is counted where it is seen.
func (r *run) report(outcome string, got result, took time.Duration) {
	if outcome != died {
		r.cfg.Observer.Observe(commitbox.SchedulerRuns, 1, r.job.Name, outcome)
	}
	r.cfg.Observer.Observe(commitbox.SchedulerSeconds, took.Seconds(), r.job.Name)
	log := r.cfg.Logger.With("job", r.job.Name, "run", r.tick.Run, "tick", r.tick.At, "outcome", outcome, "took", took)
	text := check.Clean(got.text, errorMax)
	switch outcome {
	case succeeded:
		log.Debug("scheduler: run ended")
	case cancelled:
		log.Info("scheduler: run was cut short, because the process stops", "error", text)
	case panicked:
		var stack []byte
		if p, ok := got.err.(*PanicError); ok { //nolint:errorlint // made here, and a user's error is asked nothing
			stack = p.Stack
		}
		log.Error("scheduler: run failed", "error", text, "stack", string(stack))
	case hung:
		r.cfg.Observer.Observe(commitbox.SchedulerErrors, 1, "hung")
		log.Error("scheduler: run does not end and is left behind", "error", text)
	case died:
		r.cfg.Observer.Observe(commitbox.SchedulerErrors, 1, "lease_lost")
		log.Error("scheduler: run lost its lease and was stopped", "error", text)
	default:
		log.Error("scheduler: run failed", "error", text)
	}
}

// fenced logs an outcome that came too late to be written.
func (r *run) fenced(outcome string) {
	r.cfg.Observer.Observe(commitbox.SchedulerErrors, 1, "lease_lost")
	r.cfg.Logger.Error("scheduler: run outlived its lease and counts as died", "job", r.job.Name, "run", r.tick.Run, "outcome", outcome)
}

// moved logs what was done to a row without a run.
func (e *engine) moved(j *job, row *db.ScheduleLookRow, d decision) {
	log := e.cfg.Logger.With("job", j.Name, "tick", row.NextTickAt, "next", d.plan.tick)
	switch d.do {
	case skip:
		e.cfg.Observer.Observe(commitbox.SchedulerMissed, 1, j.Name)
		log.Warn("scheduler: tick was missed", "late", row.Now.Sub(row.DueAt))
	case adopt:
		log.Info("scheduler: job has another timetable now", "spec", j.Spec, "zone", j.Zone, "spec_before", row.Spec, "zone_before", row.Zone)
	case rewind:
		log.Warn("scheduler: the database's clock has gone back, the next tick is planned anew", "now", row.Now)
	case idle, bury, claim:
	}
}

// noteForeign says once that a job is left to processes with another timetable.
func (e *engine) noteForeign(j *job, row *db.ScheduleLookRow, d decision) {
	foreign := row.Spec != j.Spec || row.Zone != j.Zone
	if standing := foreign && d.do == idle; standing != e.standing[j.Name] {
		e.standing[j.Name] = standing
		e.cfg.Logger.Info("scheduler: job is left to processes with another timetable", "job", j.Name, "left", standing, "spec", j.Spec, "their_spec", row.Spec)
	}
}
