package scheduler

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/ownpool"
	"github.com/commitbox/commitbox/internal/schema"
	"github.com/commitbox/commitbox/rights"
)

// Cleanup keeps the tables small: it removes completed and dead inbox rows after their retention, makes failed rows dead that
// nobody tries any more, removes discarded messages, days of kept messages and what relays left that are gone, and hands expired
// leases to completers. It never removes a message that is not delivered, nor a pending or failed inbox row.
//
// It works in short transactions of few rows, skips rows that somebody holds, and may run on any number of replicas at once:
// one of them works, the others skip their turn. It is safe for concurrent use and has nothing to close; a run opens two
// connections with the settings of the pool and closes them; behind a pooler it needs two of the server's at once. A process that dies leaves a part done, and no lock.
//
// What it does not promise: that a row goes at the end of its retention (it goes with a later run), or that the files become
// smaller (vacuum makes their space free for new rows).
type Cleanup struct {
	pool   *pgxpool.Pool
	cfg    CleanupConfig
	schema schema.Name
	clock  clockGuard
	now    func() time.Time

	progress time.Duration // from one line in the log to the next

	mu    sync.Mutex // a run
	sizes map[string]*batchSize
	next  string // the task that the last run would have gone on with

	waiting map[string]<-chan completed // completers that did not return when their time was up
}

// NewCleanup returns a Cleanup. It sends nothing; its error names every field that is wrong.
func NewCleanup(pool *pgxpool.Pool, cfg CleanupConfig) (*Cleanup, error) {
	cfg.fill()
	err := cfg.check()
	if pool == nil {
		err = errors.Join(&commitbox.InputError{Field: "pool", Problem: "is nil"}, err)
	}
	if err != nil {
		return nil, err
	}
	name, err := schema.Parse(cfg.Schema)
	cfg.Completers = maps.Clone(cfg.Completers)
	born := time.Now()
	return &Cleanup{
		pool: pool, cfg: cfg, schema: name, clock: clockGuard{born: reading{born.Round(0), born}}, now: time.Now, sizes: map[string]*batchSize{},
		progress: progressEvery, waiting: map[string]<-chan completed{},
	}, err
}

// Job returns the job that cleans up once an hour, on one of the replicas that run it. Its fields may be changed.
func (c *Cleanup) Job() Job {
	return Job{
		Name: "cleanup", Spec: "17 * * * *", CatchUp: true, Jitter: 5 * time.Minute,
		Timeout: 2*c.cfg.Budget + time.Hour, // completers have the budget too
		Run: func(ctx context.Context, _ Tick) error {
			_, err := c.RunOnce(ctx)
			return err
		},
	}
}

// RunOnce removes what is due, until nothing is left, the budget is used up or ctx ends, and says what it did. A run
// that finds nothing costs a few statements for each consumer. A failure of one
// kind of row does not stop the others; the errors are returned together. A *ClockError says that nothing was done because the
// database's clock cannot be believed; a *rights.MissingError names the rights that the role lacks.
func (c *Cleanup) RunOnce(ctx context.Context) (CleanupReport, error) {
	if !c.mu.TryLock() {
		report := CleanupReport{Skipped: true}
		c.tell(&report, nil)
		return report, nil
	}
	defer c.mu.Unlock()
	r, start := &cleaning{c: c}, time.Now()
	err := rights.Explain(ctx, c.pool, c.cfg.Schema, r.run(ctx), rights.Cleanup)
	r.report.Took = time.Since(start)
	c.tell(&r.report, err)
	return r.report, err
}

// size returns the size of the next batch of a kind.
func (c *Cleanup) size(kind string) *batchSize {
	if c.sizes[kind] == nil {
		c.sizes[kind] = &batchSize{min(firstBatch, c.cfg.Batch), c.cfg.Batch}
	}
	return c.sizes[kind]
}

// cleaning is one run.
type cleaning struct {
	c      *Cleanup
	pool   *pgxpool.Pool // its own: one connection for the lead, one for the batches
	asOf   time.Time     // the database's clock at the start; every age is counted from it
	report CleanupReport
	errs   []error
}

func (r *cleaning) run(ctx context.Context) error {
	pool, err := ownpool.Open(ctx, r.c.pool, 2, pgx.QueryExecModeCacheDescribe)
	if err != nil {
		return fmt.Errorf("cleanup: open connections: %w", err)
	}
	defer pool.Close()
	r.pool = pool
	now, err := r.c.readClocks(ctx, db.New(r.c.schema.On(pool)))
	if err != nil {
		return fmt.Errorf("cleanup: read the database's clock: %w", err)
	}
	if err := r.c.clock.admit(now); err != nil {
		return err
	}
	r.asOf = now.database
	err = r.leading(ctx, r.all)
	if err == nil && len(r.errs) == 0 {
		return nil
	}
	return fmt.Errorf("cleanup: %w", errors.Join(append(r.errs, err)...))
}

// leading runs do while this is the only cleaner.
func (r *cleaning) leading(ctx context.Context, do func(context.Context) error) error {
	tx, err := r.pool.BeginTx(ctx, readCommitted)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // it changed nothing; the end of its connection does as well
	idle := 2*r.c.cfg.Budget + time.Minute
	lead, err := db.New(r.c.schema.On(tx)).CleanupLead(ctx, milliseconds(idle))
	switch {
	case err != nil:
		return err
	case !lead.Lead:
		r.report.Skipped = true
		return nil
	}
	return do(ctx)
}

// all does everything that a run does. Its error is one after which nothing can go on.
func (r *cleaning) all(ctx context.Context) error {
	r.resume(ctx)
	if err := r.days(ctx); err != nil {
		return err
	}
	consumers, err := r.consumers(ctx)
	if err != nil {
		return err
	}
	policies, err := r.policies(ctx)
	if err != nil {
		return err
	}
	if err := r.remove(ctx, r.tasks(consumers, policies)); err != nil {
		return err
	}
	if err := r.measure(ctx); err != nil {
		return err
	}
	return r.look(ctx, consumers)
}

// note keeps the error of one part, or returns it if nothing can go on after it.
func (r *cleaning) note(ctx context.Context, part string, err error) error {
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case answered(err):
		r.errs = append(r.errs, fmt.Errorf("%s: %w", part, err))
		return nil
	}
	return fmt.Errorf("%s: %w", part, err)
}

func (r *cleaning) days(ctx context.Context) error {
	err := r.once(ctx, func(q *db.Queries) error {
		days, err := q.CleanupSentDays(ctx)
		r.report.DaysMade, r.report.DaysDropped = int(days.Made), int(days.Dropped)
		return err
	})
	return r.note(ctx, "days of kept messages", err)
}

func (r *cleaning) consumers(ctx context.Context) (names []string, err error) {
	err = r.once(ctx, func(q *db.Queries) (err error) {
		names, err = q.InboxConsumers(ctx)
		return err
	})
	return names, r.note(ctx, "consumers", err)
}
