package scheduler

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/schema"
)

// Scheduler runs jobs. Any number of them may run, in any number of processes, with the same jobs or others.
//
// If replicas have different timetables for a job of one name, as in a rollout, the one that started last has its way: its
// timetable is written into the job's row, and replicas with another one leave the job alone until no replica with the
// row's timetable is left.
type Scheduler struct {
	cfg    Config
	jobs   []*job
	pool   *pgxpool.Pool
	schema schema.Name

	mu sync.Mutex // held by Run and RunOnce
}

// New returns a scheduler; it touches the database when it runs. The error names everything that is wrong with the jobs
// and the configuration. A run has no connection of the scheduler's: that has two of its own, with the settings of pool,
// so that a busy pool costs no lease.
func New(pool *pgxpool.Pool, jobs []Job, cfg Config) (*Scheduler, error) {
	cfg = cfg.withDefaults()
	errs := []error{cfg.check()}
	if pool == nil {
		errs = append(errs, &commitbox.InputError{Field: "pool", Problem: "is nil"})
	}
	if len(jobs) == 0 {
		errs = append(errs, &commitbox.InputError{Field: "jobs", Problem: "is empty"})
	}
	s := &Scheduler{cfg: cfg, pool: pool}
	seen := map[string]bool{}
	for _, each := range jobs {
		j, err := newJob(each)
		if seen[each.Name] {
			err = errors.Join(err, &commitbox.InputError{Field: "jobs", Problem: fmt.Sprintf("name %q twice", each.Name)})
		}
		seen[each.Name] = true
		errs, s.jobs = append(errs, err), append(s.jobs, j)
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("scheduler: %w", err)
	}
	s.schema, _ = schema.Parse(cfg.Schema)
	return s, nil
}

// ErrRunning refuses a second Run or RunOnce of one Scheduler at the same time.
var ErrRunning = errors.New("scheduler: is already running")

// Run runs ticks until ctx ends. It then claims nothing more, lets runs go on for Config.Drain, ends their contexts, waits
// for Config.Grace and returns nil, or an error that names the jobs that have not returned. Writing outcomes may add up to
// Config.Lease if the database does not answer. While the database is away Run keeps trying, Config.Poll apart at most;
// no error of the database or of a job ends it.
func (s *Scheduler) Run(ctx context.Context) error {
	e, err := s.open(ctx)
	if err != nil {
		return err
	}
	defer e.close()
	for failures := 0; ctx.Err() == nil; {
		wait, err := e.look(ctx)
		if err == nil {
			failures = 0
		} else if ctx.Err() == nil {
			failures++
			wait = retryDelay(failures, s.cfg.Poll, s.cfg.random)
			e.lostTouch(err, wait)
		}
		e.wait(ctx, wait)
	}
	e.drain()
	return e.stuck()
}

// RunOnce looks at every job once, runs what is due, waits for it, and returns how many runs that were and the errors of
// those that did not succeed, joined with that of the database. If ctx ends it drains as Run does.
func (s *Scheduler) RunOnce(ctx context.Context) (runs int, err error) {
	e, err := s.open(ctx)
	if err != nil {
		return 0, err
	}
	defer e.close()
	_, err = e.look(ctx)
	select {
	case <-e.idle():
	case <-ctx.Done():
		e.drain()
	}
	return e.started, errors.Join(err, e.stuck(), e.failed())
}
