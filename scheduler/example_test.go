package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/scheduler"
)

// A service runs its jobs beside everything else, on every replica.
func ExampleScheduler_Run() {
	serve := func(ctx context.Context, pool *pgxpool.Pool, sendReport func(context.Context, time.Time) error) error {
		s, err := scheduler.New(pool, []scheduler.Job{
			{
				Name: "daily report", Spec: "30 6 * * *", Zone: "Europe/Berlin", CatchUp: true, Timeout: 10 * time.Minute,
				Run: func(ctx context.Context, tick scheduler.Tick) error { return sendReport(ctx, tick.At) },
			},
			{
				Name: "old carts", Spec: "@every 15m", Jitter: time.Minute,
				Run: func(ctx context.Context, _ scheduler.Tick) error {
					_, err := pool.Exec(ctx, `delete from cart where touched_at < now() - interval '7 days'`)
					return err
				},
			},
		}, scheduler.Config{})
		if err != nil {
			return err
		}
		return s.Run(ctx) // until ctx ends
	}
	_ = serve
}

// Work whose process died, and messages that failed and that no broker delivers again, are brought back by a job.
func ExampleJob_resume() {
	complete := func(box *inbox.Box, pay func(ctx context.Context, tx pgx.Tx, payload []byte) error) scheduler.Job {
		return scheduler.Job{Name: "resume payments", Spec: "@every 1m", Run: func(ctx context.Context, _ scheduler.Tick) error {
			_, err := inbox.Resume(ctx, box, "payments", func(ctx context.Context, msg inbox.Message) error {
				_, err := inbox.Process(ctx, box, msg, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
					return inbox.Void{}, pay(ctx, tx, msg.Payload)
				})
				return err
			})
			return err
		}}
	}
	_ = complete
}

// What the last runs came to, for a page or a probe.
func ExampleScheduler_Status() {
	check := func(ctx context.Context, s *scheduler.Scheduler) error {
		jobs, err := s.Status(ctx)
		for _, job := range jobs {
			if job.Outcome != "succeeded" && job.Outcome != "running" && job.Runs > 0 {
				err = errors.Join(err, fmt.Errorf("%s at %v on %s: %s %s", job.Name, job.TickAt, job.Owner, job.Outcome, job.Error))
			}
		}
		return err
	}
	_ = check
}
