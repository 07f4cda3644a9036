package scheduler

import (
	"context"
	"time"

	"github.com/commitbox/commitbox/internal/db"
)

// Status is a job's row. A time that has not come yet is zero.
type Status struct {
	Name, Spec, Zone string
	Paused           bool      // by schedule_pause
	SeenAt           time.Time // when a process with this timetable last looked; an old one: no process has the job any more
	NextAt           time.Time // the next tick
	DueAt            time.Time // the next tick and its jitter
	Missed           int64     // how often ticks were given up because no process was there; a pause of any length counts once
	Runs, Failures   int64

	// The last run.
	TickAt, StartedAt, FinishedAt time.Time
	Duration                      time.Duration // until now, while it runs
	// Outcome is empty before the first run; running, succeeded, failed, panicked, timed_out, hung (it did not return
	// after its context had ended), died (its process did, or was cut off), or cancelled (its process was stopped).
	Outcome string
	Error   string // at most 1000 bytes
	Owner   string // the process
	Attempt int    // which run of its tick it was

	SucceededAt time.Time // when a run last succeeded
}

// Status returns every job of the schema with its last run, by name. The view schedule_status shows the same.
func (s *Scheduler) Status(ctx context.Context) ([]Status, error) {
	rows, err := db.New(s.schema.On(s.pool)).ScheduleStatus(ctx)
	list := make([]Status, len(rows))
	for i, r := range rows {
		list[i] = Status{
			Name: r.Name, Spec: r.Spec, Zone: r.Zone, Paused: r.Paused, SeenAt: r.SeenAt, NextAt: r.NextTickAt, DueAt: r.DueAt,
			Missed: r.Missed, Runs: r.Runs, Failures: r.Failures, TickAt: orZero(r.TickAt), StartedAt: orZero(r.StartedAt),
			FinishedAt: orZero(r.FinishedAt), Duration: time.Duration(r.DurationSeconds * float64(time.Second)), Outcome: r.Outcome,
			Error: r.Error, Owner: r.Owner, Attempt: int(r.Attempt), SucceededAt: orZero(r.SucceededAt),
		}
	}
	return list, err
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return *t
}
