package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
)

// Job is a piece of work with a timetable. All replicas that name the same Job in the same schema share its ticks.
type Job struct {
	Name string // the job's row; at most 63 bytes
	// Spec is a cron line with five fields (minute, hour, day of month, month, day of week), or six with seconds in
	// front; or @hourly, @daily, @weekly, @monthly, @yearly; or "@every 90s". As in cron, if both days are restricted
	// either may match. An interval counts from tick to tick in the database, so restarts do not put it off; it is at
	// least 100 ms, and its first tick is one interval after the job was first seen.
	Spec string
	// Zone is an IANA name such as "Europe/Berlin" in which a cron line is read; default "UTC". A line with fixed hours
	// follows the wall clock of the zone: what falls into the hour that is left out in spring runs once, right after it;
	// in the hour that is repeated in autumn it runs the first time only. A line for every hour follows real time. The
	// program needs the zone's data: the system's, or import time/tzdata.
	Zone string
	// CatchUp makes a tick that no replica was there for run once when one is back, however many were missed, and starts
	// a run again that its process did not live to finish, up to three times in all. Without it a tick that is more than
	// Config.Late late is given up and counted as missed. An interval is always caught up with.
	CatchUp bool
	// Jitter delays each tick by a random time below it, but below half the time to the next tick, so that not everything
	// in the world runs at midnight. All replicas see the same delay. Default 0.
	Jitter time.Duration
	// Timeout ends the context of a run; default 1 h.
	Timeout time.Duration
	// Run does the work. An error, a panic and runtime.Goexit are failures; the next tick comes all the same. It should
	// return soon after ctx ends; a run that does not is reported as hung and left behind. It may run twice at once only
	// if a run outlives its lease (a stopped process, a run left behind).
	Run func(ctx context.Context, tick Tick) error
}

// Tick is what a run knows about itself.
type Tick struct {
	Job string
	At  time.Time // the time in the timetable, in the job's zone; the run starts then or later
	// Run counts the runs of the job over all replicas and is never repeated: a fencing token for what the run writes.
	Run     int64
	Attempt int // 1; more if earlier runs of this tick did not live to finish (CatchUp)
}

const (
	nameMax        = 63
	specMax        = 255
	defaultTimeout = time.Hour
)

// job is a Job that was checked.
type job struct {
	Job
	timetable timetable
	zone      *time.Location
}

func newJob(j Job) (*job, error) {
	if j.Zone == "" {
		j.Zone = "UTC"
	}
	if j.Timeout == 0 {
		j.Timeout = defaultTimeout
	}
	errs := []error{check.Text("Name", j.Name, nameMax), check.Text("Spec", j.Spec, specMax), check.Text("Zone", j.Zone, nameMax)}
	if j.Timeout < 0 {
		errs = append(errs, &commitbox.InputError{Field: "Timeout", Problem: "is negative"})
	}
	if j.Jitter < 0 {
		errs = append(errs, &commitbox.InputError{Field: "Jitter", Problem: "is negative"})
	}
	if j.Run == nil {
		errs = append(errs, &commitbox.InputError{Field: "Run", Problem: "is nil"})
	}
	table, zone, err := parse(j.Spec, j.Zone)
	if err := errors.Join(append(errs, err)...); err != nil {
		return nil, fmt.Errorf("scheduler: job %q: %w", j.Name, err)
	}
	return &job{j, table, zone}, nil
}
