// Command cleanup-worker keeps the tables of commitbox small and brings back work whose process has died. It makes a database of its
// own, fills it with rows that are over and rows that are not, runs the worker until nothing is left to do, and shows what became of them.
//
// What a real worker would hold is in worker.go.
package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
	"github.com/commitbox/commitbox/scheduler"
)

//go:embed rows.sql
var rows string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Getenv("DATABASE_URL"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "cleanup-worker:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, databaseURL string, out io.Writer) (err error) {
	slog.SetDefault(slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelWarn})))
	db, err := exampledb.Create(ctx, databaseURL, rows)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Drop()) }()
	if err := show(ctx, db.Pool, "before", out); err != nil {
		return err
	}
	// One role does both here, because roles belong to the whole server; the test gives each its own.
	err = until(ctx, db.Pool, db.Pool, db.Pool, out)
	if ctx.Err() != nil {
		fmt.Fprintln(out, "stopped: what had begun was let end, the next worker goes on from here")
		if errors.Is(err, context.Canceled) {
			err = nil
		}
	}
	return errors.Join(err, show(context.WithoutCancel(ctx), db.Pool, "after", out))
}

// until works until a run has found nothing more to do and the expired lease has been brought back.
func until(ctx context.Context, cleaner, handler, observer *pgxpool.Pool, out io.Writer) error {
	ctx, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	cleaned, shipped := make(chan struct{}), make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- work(ctx, cleaner, handler, func(r scheduler.CleanupReport) {
			fmt.Fprintf(out, "cleanup: %d completed and %d dead rows removed, %d failed ones dead now, %d discarded messages removed\n",
				r.Completed, r.Dead, r.Abandoned, r.Discarded)
			if r.Finished && r.Completed+r.Dead+r.Abandoned+r.Discarded == 0 {
				select {
				case <-cleaned:
				default:
					close(cleaned)
				}
			}
		})
	}()
	go func() {
		defer close(shipped)
		for ctx.Err() == nil {
			var n int
			if err := observer.QueryRow(ctx, `select count(*) from shipment`).Scan(&n); err == nil && n > 0 {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
	var err error
	for _, what := range []<-chan struct{}{cleaned, shipped} {
		select {
		case <-what:
		case err = <-done:
			done <- err
		}
	}
	stop()
	return errors.Join(err, <-done)
}

// show prints how many rows of each kind there are.
func show(ctx context.Context, pool *pgxpool.Pool, when string, out io.Writer) error {
	found, err := pool.Query(ctx, `select consumer || ': ' || status, count(*) from commitbox.inbox group by 1
		union all select 'outbox: not delivered', count(*) from commitbox.outbox_message
		union all select 'outbox: dead', count(*) from commitbox.outbox_dead where discarded_at is null
		union all select 'outbox: discarded', count(*) from commitbox.outbox_dead where discarded_at is not null order by 1`)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, when)
	table := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	var what string
	var n int
	_, err = pgx.ForEachRow(found, []any{&what, &n}, func() error {
		_, err := fmt.Fprintf(table, "  %s\t%d\n", what, n)
		return err
	})
	return errors.Join(err, table.Flush())
}
