package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/rights"
	"github.com/commitbox/commitbox/scheduler"
)

// consumer is whose leases the worker brings back.
const consumer = "shipping"

// work cleans up and brings back expired leases, each by its timetable, until ctx ends. Any number of replicas may do it at once. The two
// pools have roles of their own: one that can remove nothing but what is over, and one that handles messages.
func work(ctx context.Context, cleaner, handler *pgxpool.Pool, told func(scheduler.CleanupReport)) error {
	if err := rights.Check(ctx, cleaner, "", rights.Cleanup, rights.Schedule); err != nil {
		return err
	}
	if err := rights.Check(ctx, handler, "", rights.Consume); err != nil {
		return err
	}
	box, err := inbox.New(handler, inbox.Config{})
	if err != nil {
		return err
	}
	cleanup, err := scheduler.NewCleanup(cleaner, scheduler.CleanupConfig{})
	if err != nil {
		return err
	}
	jobs := []scheduler.Job{
		{Name: "cleanup", Spec: "@every 1s", CatchUp: true, Run: func(ctx context.Context, _ scheduler.Tick) error { // cleanup.Job() does it once an hour
			report, err := cleanup.RunOnce(ctx)
			told(report)
			return err
		}},
		{Name: "resume-" + consumer, Spec: "@every 1s", Timeout: time.Minute, Run: func(ctx context.Context, _ scheduler.Tick) error {
			_, err := inbox.Resume(ctx, box, consumer, func(ctx context.Context, msg inbox.Message) error { return ship(ctx, box, msg) })
			return err
		}},
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go confirm(ctx, cleanup)
	s, err := scheduler.New(cleaner, jobs, scheduler.Config{})
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

// confirm lets an operator say, with SIGHUP to every replica, that the database's clock is right after all.
func confirm(ctx context.Context, cleanup *scheduler.Cleanup) {
	hup := make(chan os.Signal, 1)
	signal.Notify(hup, syscall.SIGHUP)
	defer signal.Stop(hup)
	for {
		select {
		case <-ctx.Done():
			return
		case <-hup:
			if err := cleanup.ConfirmClock(ctx); err != nil {
				slog.Error("the clock could not be confirmed", "error", err)
			}
		}
	}
}

// ship handles a message, the first time as later: the carrier is asked once, and a process that dies after it goes on behind it.
func ship(ctx context.Context, box *inbox.Box, msg inbox.Message) error {
	_, err := inbox.ProcessLeased(ctx, box, msg, func(ctx context.Context, lease *inbox.Lease) (string, error) {
		label, err := inbox.Step(ctx, lease, "label", func(context.Context) (string, error) {
			return fmt.Sprintf("label of %s", msg.ID.Message), nil // here a carrier is called, with the message's id as its idempotency key
		})
		if err != nil {
			return "", err
		}
		return inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (string, error) {
			_, err := tx.Exec(ctx, `insert into shipment (parcel, label) values ($1, $2)`, msg.ID.Message, label)
			return label, err
		})
	})
	return err
}
