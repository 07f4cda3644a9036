package scheduler

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/db"
)

// tasks lists what there may be to remove. Failed rows are made dead first, and age from then on.
func (r *cleaning) tasks(consumers []string, policies map[string]policy) (tasks []*task) {
	for _, consumer := range consumers {
		p, own := policies[consumer]
		if !own {
			p = policies[anyConsumer]
		}
		if !p.Sound {
			r.odd("the rows of consumer %q are all kept: its policy is missing or incomplete, or has a retention shorter than the retry horizon", consumer)
			continue
		}
		tasks = append(tasks, r.abandon(consumer), r.ended(consumer, kindCompleted, p.Retention), r.ended(consumer, kindDead, p.DeadRetention))
	}
	return append(tasks, r.discarded(), r.gone())
}

// policy says how long the rows of one consumer are kept. Its zero value is not sound.
type policy = db.CleanupPoliciesRow

const anyConsumer = "*"

func (r *cleaning) policies(ctx context.Context) (map[string]policy, error) {
	var rows []policy
	err := r.once(ctx, func(q *db.Queries) (err error) {
		rows, err = q.CleanupPolicies(ctx)
		return err
	})
	policies := make(map[string]policy, len(rows))
	for _, p := range rows {
		policies[p.Consumer] = p
	}
	return policies, r.note(ctx, "policies", err)
}

func (r *cleaning) ended(consumer, status string, seconds float64) *task {
	var after time.Time
	return &task{status, consumer, func(ctx context.Context, q *db.Queries, atMost int32) (int64, error) {
		row, err := q.CleanupEnded(ctx, db.CleanupEndedParams{
			Consumer: consumer, Status: status, AfterAt: after, AsOf: r.asOf, RetentionSeconds: seconds, AtMost: atMost,
		})
		if err == nil {
			after = row.LastAt
		}
		return row.Removed, err
	}}
}

func (r *cleaning) abandon(consumer string) *task {
	return &task{kindAbandoned, consumer, func(ctx context.Context, q *db.Queries, atMost int32) (int64, error) {
		return q.CleanupAbandon(ctx, db.CleanupAbandonParams{Consumer: consumer, AsOf: r.asOf, AtMost: atMost})
	}}
}

func (r *cleaning) discarded() *task {
	return &task{kindDiscarded, "", func(ctx context.Context, q *db.Queries, atMost int32) (int64, error) {
		return q.CleanupDiscarded(ctx, db.CleanupDiscardedParams{AsOf: r.asOf, RetentionSeconds: r.c.cfg.Discarded.Seconds(), AtMost: atMost})
	}}
}

func (r *cleaning) gone() *task {
	return &task{kindGone, "", func(ctx context.Context, q *db.Queries, atMost int32) (int64, error) {
		gone, err := q.CleanupGone(ctx, db.CleanupGoneParams{AsOf: r.asOf, AtMost: atMost})
		return gone.Relays + gone.Replicas, err
	}}
}

const progressEvery = 10 * time.Second

// remove does batches of all tasks in turn, so that none waits for the end of another, until all are done or the budget is used
// up. It begins with the task that the last run did not get to.
func (r *cleaning) remove(ctx context.Context, tasks []*task) error {
	if i := slices.IndexFunc(tasks, func(t *task) bool { return t.name() == r.c.next }); i > 0 {
		tasks = slices.Concat(tasks[i:], tasks[:i])
	}
	start, told := time.Now(), time.Now()
	for len(tasks) > 0 {
		t := tasks[0]
		tasks = tasks[1:]
		done, more, err := r.batch(ctx, t)
		r.count(t, done)
		if err := r.note(ctx, fmt.Sprintf("%s rows of %q", t.kind, t.consumer), err); err != nil {
			return err
		}
		if more {
			tasks = append(tasks, t)
		}
		if len(tasks) > 0 && time.Since(start) >= r.c.cfg.Budget {
			r.c.next = tasks[0].name()
			return nil
		}
		if time.Since(told) > r.c.progress {
			told = time.Now()
			r.c.cfg.Logger.Info("cleanup: goes on", "report", r.report)
		}
		if more && !sleep(ctx, r.c.cfg.Pause) {
			return context.Cause(ctx)
		}
	}
	r.c.next, r.report.Finished = "", len(r.errs) == 0
	return nil
}

func (r *cleaning) count(t *task, n int64) {
	if n == 0 {
		return
	}
	r.report.add(t.kind, n)
	r.c.cfg.Observer.Observe(commitbox.CleanupRows, float64(n), t.consumer, t.kind)
	if t.kind == kindAbandoned {
		r.c.cfg.Logger.Warn("cleanup: failed messages that nobody tried again are dead now", "consumer", t.consumer, "messages", n)
	}
}

// odd notes what a run does not understand.
func (r *cleaning) odd(format string, args ...any) {
	what := fmt.Sprintf(format, args...)
	r.report.Odd = append(r.report.Odd, what)
	r.c.cfg.Logger.Warn("cleanup: rows that are not understood are left", "what", what)
}

// measure tells the observer how large the tables are.
func (r *cleaning) measure(ctx context.Context) error {
	var tables []db.CleanupSizesRow
	err := r.once(ctx, func(q *db.Queries) (err error) {
		tables, err = q.CleanupSizes(ctx)
		return err
	})
	for _, t := range tables {
		r.c.cfg.Observer.Observe(commitbox.TableBytes, float64(t.Bytes), t.Name)
	}
	return r.note(ctx, "sizes", err)
}

// look counts what a run may not touch: leases that nobody brings back, and rows that it does not understand.
func (r *cleaning) look(ctx context.Context, consumers []string) error {
	for _, consumer := range consumers {
		if err := r.note(ctx, fmt.Sprintf("look at %q", consumer), r.lookAt(ctx, consumer)); err != nil {
			return err
		}
	}
	return nil
}

func (r *cleaning) lookAt(ctx context.Context, consumer string) error {
	var expired, future int64
	err := r.once(ctx, func(q *db.Queries) (err error) {
		if expired, err = q.CleanupExpired(ctx, consumer); err != nil {
			return err
		}
		future, err = q.CleanupFuture(ctx, consumer)
		return err
	})
	if err != nil {
		return err
	}
	r.c.cfg.Observer.Observe(commitbox.InboxExpiredLeases, float64(expired), consumer)
	if expired > 0 && r.c.cfg.Completers[consumer] == nil {
		r.report.Expired += expired
		r.c.cfg.Logger.Warn("cleanup: leases have expired and nobody brings them back", "consumer", consumer, "leases", expired)
	}
	if future > 0 {
		r.odd("%d rows of consumer %q ended in the future and will not get old", future, consumer)
	}
	return nil
}
