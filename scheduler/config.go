package scheduler

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"os"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/schema"
)

// Config sets up a [Scheduler]. The zero value is usable.
type Config struct {
	Schema string // default "commitbox"
	// Owner names this process in the rows; at most 200 bytes, default host and process id.
	Owner string
	// Lease is how long after the death of a process its runs are seen as died. A run renews it three times as often; one
	// that cannot, because the database is away, is told to stop before it ends. Default 30 s, at least 1 s.
	Lease time.Duration
	// Poll is how long the scheduler waits, at most, before it looks at the rows again; a tick is looked for when it is
	// due. Default 5 s. A process with another timetable for a job takes over 3·Poll + Lease after the last process with
	// the row's timetable has gone.
	Poll time.Duration
	// Late is up to when a tick of a cron line still runs if nobody was there when it was due, or the run before it was
	// under way. Default 1 min. CatchUp and intervals know no such limit.
	Late time.Duration
	// Drain is how long runs may go on after Run's context has ended; then their contexts end. Default 15 s.
	Drain time.Duration
	// Grace is how long a run whose context has ended may take to return before it is left behind. Default 5 s.
	Grace time.Duration

	Observer commitbox.Observer // default: none
	Logger   *slog.Logger       // default: slog.Default()

	random func() float64 // for jitter
}

const (
	ownerMax = 200
	leaseMin = time.Second
)

func (c Config) withDefaults() Config {
	c.Owner = cmp.Or(c.Owner, processName())
	c.Lease = cmp.Or(c.Lease, 30*time.Second)
	c.Poll = cmp.Or(c.Poll, 5*time.Second)
	c.Late = cmp.Or(c.Late, time.Minute)
	c.Drain = cmp.Or(c.Drain, 15*time.Second)
	c.Grace = cmp.Or(c.Grace, 5*time.Second)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	c.Observer = careful{cmp.Or(c.Observer, commitbox.Discard), c.Logger}
	c.random = mathrand.Float64
	return c
}

// processName tells a person where to look. A few letters tell containers apart that all are process 1 of one host name.
func processName() string {
	host, err := os.Hostname()
	if err != nil || check.Text("", host, ownerMax/2) != nil {
		host = "unknown"
	}
	return fmt.Sprintf("%s/%d/%s", host, os.Getpid(), rand.Text()[:6])
}

// check names every bad field at once.
func (c Config) check() error {
	_, schemaErr := schema.Parse(c.Schema)
	errs := []error{schemaErr, check.Text("Owner", c.Owner, ownerMax)}
	if c.Lease < leaseMin {
		errs = append(errs, &commitbox.InputError{Field: "Lease", Problem: "is below 1s"})
	}
	for _, f := range []struct {
		name  string
		value time.Duration
	}{{"Poll", c.Poll}, {"Late", c.Late}, {"Drain", c.Drain}, {"Grace", c.Grace}} {
		if f.value <= 0 {
			errs = append(errs, &commitbox.InputError{Field: f.name, Problem: "is not positive"})
		}
	}
	return errors.Join(errs...)
}

// standby is how old the last sign of a process with the row's timetable is when one with another takes over.
func (c *Config) standby() time.Duration { return 3*c.Poll + c.Lease }
