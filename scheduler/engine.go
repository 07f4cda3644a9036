package scheduler

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/ownpool"
)

// engine is one call of Run or RunOnce.
type engine struct {
	*Scheduler
	unlock    func()
	pool      *pgxpool.Pool
	queries   *db.Queries
	announced map[string]bool // jobs whose timetable this process has compared with the row
	standing  map[string]bool // jobs that were reported as left to another timetable
	started   int

	base context.Context // of the runs: outlives the caller's by Config.Drain
	end  context.CancelCauseFunc

	runs sync.WaitGroup
	news chan struct{} // a run has ended

	mu     sync.Mutex
	active map[string]bool // jobs of which a run has not come back yet
	left   map[string]int  // runs that were left behind and may still be at work, by job
	errs   []error
}

// leftMax bounds the runs of a job that are left behind in one process. Beyond it the job is for other processes.
const leftMax = 3

// statementLimit bounds every exchange with the database, so that a server that does not answer is noticed.
const statementLimit = 5 * time.Second

var (
	errStopping  = errors.New("scheduler: the process is stopping")
	errLeaseLost = errors.New("scheduler: the run's lease has ended: the database was away, or the process stood still")
)

func (s *Scheduler) open(ctx context.Context) (*engine, error) {
	if !s.mu.TryLock() {
		return nil, ErrRunning
	}
	const statements = 2 // one for ticks, one for leases
	pool, err := ownpool.Open(ctx, s.pool, statements, pgx.QueryExecModeCacheDescribe)
	if err != nil {
		s.mu.Unlock()
		return nil, fmt.Errorf("scheduler: open its connections: %w", err)
	}
	e := &engine{
		Scheduler: s, unlock: s.mu.Unlock, pool: pool, queries: db.New(s.schema.On(pool)),
		announced: map[string]bool{}, standing: map[string]bool{}, active: map[string]bool{}, left: map[string]int{}, news: make(chan struct{}, 1),
	}
	e.base, e.end = context.WithCancelCause(context.WithoutCancel(ctx))
	return e, nil
}

func (e *engine) close() {
	e.end(errStopping)
	e.pool.Close()
	e.unlock()
}

// look does for every job what its row and the database's time ask for, and returns after which time to look again. An
// error with one job does not keep it from the others.
func (e *engine) look(ctx context.Context) (wait time.Duration, err error) {
	ctx, cancel := context.WithTimeout(ctx, statementLimit)
	defer cancel()
	rows, err := e.rows(ctx)
	if err != nil {
		return 0, err
	}
	wait = time.Duration((0.8 + 0.4*e.cfg.random()) * float64(e.cfg.Poll)) // replicas do not look in step
	var errs []error
	for _, j := range e.jobs {
		row, ok := rows[j.Name]
		if !ok || ctx.Err() != nil {
			continue // deleted by hand a moment ago, the next look makes it anew; or there is none
		}
		after, err := e.attend(ctx, j, &row)
		wait, errs = min(wait, after), append(errs, err)
	}
	return wait, errors.Join(errs...)
}

// rows reads the jobs' rows, and makes those that are missing.
func (e *engine) rows(ctx context.Context) (map[string]db.ScheduleLookRow, error) {
	rows, err := e.read(ctx)
	if err != nil || len(rows) == len(e.jobs) {
		return rows, err
	}
	now, err := e.queries.ScheduleClock(ctx)
	if err != nil {
		return nil, err
	}
	for _, j := range e.jobs {
		if _, ok := rows[j.Name]; ok {
			continue
		}
		first := j.plan(now, &e.cfg)
		err := e.queries.ScheduleRegister(ctx, db.ScheduleRegisterParams{Name: j.Name, Spec: j.Spec, Zone: j.Zone, NextTickAt: first.tick, DueAt: first.due})
		if err != nil {
			return nil, err
		}
	}
	return e.read(ctx)
}

func (e *engine) read(ctx context.Context) (map[string]db.ScheduleLookRow, error) {
	names := make([]string, len(e.jobs))
	for i, j := range e.jobs {
		names[i] = j.Name
	}
	list, err := e.queries.ScheduleLook(ctx, names)
	rows := make(map[string]db.ScheduleLookRow, len(list))
	for _, row := range list {
		rows[row.Name] = row
	}
	return rows, err
}

// attend does what is to be done with one job now, and says after which time there is something to do again.
func (e *engine) attend(ctx context.Context, j *job, row *db.ScheduleLookRow) (time.Duration, error) {
	d := j.decide(row, !e.announced[j.Name], &e.cfg)
	e.noteForeign(j, row, d)
	switch d.do {
	case idle:
		e.announced[j.Name] = true
		return d.wake, e.seen(ctx, j, row)
	case bury:
		return again(e.bury(ctx, j, row))
	case claim:
		if !e.mayStart(j) {
			return e.cfg.Poll, nil
		}
		return again(e.claim(ctx, j, row, d.plan))
	case adopt, rewind, skip:
	}
	return again(e.move(ctx, j, row, d))
}

// heldPause is how long a row is left alone that another session holds or has just changed.
const heldPause = 100 * time.Millisecond

// again says when to look at a row again that there was something to do with.
func again(done bool, err error) (time.Duration, error) {
	if done {
		return 0, err
	}
	return heldPause, err
}

// seen tells processes with another timetable, now and then, that this one is there.
func (e *engine) seen(ctx context.Context, j *job, row *db.ScheduleLookRow) error {
	if row.Spec != j.Spec || row.Zone != j.Zone || row.Now.Sub(row.SeenAt) < e.cfg.Poll {
		return nil
	}
	return e.queries.ScheduleSeen(ctx, db.ScheduleSeenParams{Name: j.Name, Spec: j.Spec, Zone: j.Zone, AgeSeconds: e.cfg.Poll.Seconds()})
}

func (e *engine) move(ctx context.Context, j *job, row *db.ScheduleLookRow, d decision) (bool, error) {
	missed := int64(0)
	if d.do == skip {
		missed = 1
	}
	n, err := e.queries.ScheduleMove(ctx, db.ScheduleMoveParams{
		Spec: j.Spec, Zone: j.Zone, NextTickAt: d.plan.tick, DueAt: d.plan.due, Missed: missed,
		Name: j.Name, SeenSpec: row.Spec, SeenZone: row.Zone, SeenTickAt: row.NextTickAt,
	})
	if n > 0 {
		e.announced[j.Name] = true
		e.moved(j, row, d)
	}
	return n > 0, err
}

func (e *engine) bury(ctx context.Context, j *job, row *db.ScheduleLookRow) (bool, error) {
	n, err := e.queries.ScheduleBury(ctx, db.ScheduleBuryParams{Name: j.Name, Run: row.Runs, GiveBack: j.CatchUp, AttemptsMax: attemptsMax})
	if n > 0 {
		e.cfg.Observer.Observe(commitbox.SchedulerRuns, 1, j.Name, died)
		e.cfg.Logger.Error("scheduler: the process of a run is dead, or was cut off", "job", j.Name, "run", row.Runs)
	}
	return n > 0, err
}

// claim takes the tick, if no other process has, and starts its run.
func (e *engine) claim(ctx context.Context, j *job, row *db.ScheduleLookRow, next plan) (bool, error) {
	e.announced[j.Name] = true
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), statementLimit) // a tick must not be claimed and then not run
	defer cancel()
	sent := time.Now()
	got, err := e.queries.ScheduleClaim(ctx, db.ScheduleClaimParams{
		Name: j.Name, Spec: j.Spec, Zone: j.Zone, TickAt: row.NextTickAt, NextTickAt: next.tick, DueAt: next.due,
		Owner: e.cfg.Owner, LeaseSeconds: e.cfg.Lease.Seconds(),
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	e.cfg.Observer.Observe(commitbox.SchedulerLateSeconds, row.Now.Sub(row.DueAt).Seconds(), j.Name)
	e.started++
	e.mu.Lock()
	e.active[j.Name] = true
	e.mu.Unlock()
	r := &run{engine: e, job: j, claimed: sent, tick: Tick{Job: j.Name, At: row.NextTickAt.In(j.zone), Run: got.Runs, Attempt: int(got.Attempt)}}
	e.runs.Go(r.do)
	return true, nil
}

// mayStart says whether this process has room for a run of the job: none is at work whose lease was lost, and few were
// left behind.
func (e *engine) mayStart(j *job) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return !e.active[j.Name] && e.left[j.Name] < leftMax
}

// ended notes the end of a run and wakes the loop, because the next tick may be due already.
func (e *engine) ended(j *job, err error) {
	e.mu.Lock()
	delete(e.active, j.Name)
	if err != nil {
		e.errs = append(e.errs, err)
		e.errs = e.errs[max(0, len(e.errs)-len(e.jobs)):]
	}
	e.mu.Unlock()
	select {
	case e.news <- struct{}{}:
	default:
	}
}

// leave counts a run that was left behind.
func (e *engine) leave(j *job, n int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.left[j.Name] += n
}

func (e *engine) wait(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-e.news:
	case <-timer.C:
	}
}

// idle is closed when no run is under way.
func (e *engine) idle() <-chan struct{} {
	done := make(chan struct{})
	go func() {
		e.runs.Wait()
		close(done)
	}()
	return done
}

// drain waits for the runs, first as they are, then with their contexts ended. Each ends by then: what does not return is
// left behind.
func (e *engine) drain() {
	timer := time.AfterFunc(e.cfg.Drain, func() { e.end(errStopping) })
	defer timer.Stop()
	<-e.idle()
}

// stuck names the jobs that were left behind.
func (e *engine) stuck() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	var names []string
	for name, n := range e.left {
		if n > 0 {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil
	}
	slices.Sort(names)
	return fmt.Errorf("scheduler: runs of these jobs have not returned: %s", strings.Join(names, ", "))
}

func (e *engine) failed() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	return errors.Join(e.errs...)
}
