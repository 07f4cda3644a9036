// Command two-databases moves money between accounts that are spread over two databases. Both have their own outbox with a
// relay, and their own inbox; this one program runs all of it. On the way one database goes away for a while. At the end
// the program counts the money.
//
// How an account finds its database is in shard.go, and what happens there in transfer.go; they are what a real program
// would hold.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"

	_ "embed"
)

//go:embed tables.sql
var tables string

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Getenv("DATABASE_URL"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "two-databases:", err)
		stop()
		os.Exit(1)
	}
}

const (
	databases = 2
	accounts  = 20
	transfers = 400
	opening   = 1000 // on every account at the start

	lookEvery = 20 * time.Millisecond
)

// quiet leaves out what a run with an outage is full of.
var quiet = slog.New(slog.DiscardHandler)

func run(ctx context.Context, databaseURL string, out io.Writer) (err error) {
	if databaseURL == "" {
		return errors.New("DATABASE_URL is missing; `make example NAME=two-databases` sets it")
	}
	all, err := open(ctx, databaseURL)
	defer func() { err = errors.Join(err, all.drop()) }()
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "%d transfers between %d accounts in %d databases. Every command and every message comes one to three\ntimes. When a quarter has arrived, database %d goes away.\n\n", transfers, accounts, databases, databases)
	b := newBroker(2 * transfers * copiesMax * databases)
	f := &fault{serverURL: databaseURL, away: all[databases-1], others: all[:databases-1]}
	if err := all.flow(ctx, b, f); err != nil {
		return err
	}
	r, err := all.count(ctx)
	if err != nil {
		return err
	}
	r.show(out, b, f)
	return r.verdict(b, f)
}

// open makes the databases and the accounts. What it has made is dropped by the caller, after an error too.
func open(ctx context.Context, databaseURL string) (all shards, err error) {
	for n := range databases {
		db, err := exampledb.Create(ctx, databaseURL, tables)
		if err != nil {
			return all, err
		}
		s := &shard{DB: db, number: n + 1}
		all = append(all, s)
		if s.box, err = inbox.New(db.Pool, inbox.Config{Logger: quiet}); err != nil {
			return all, err
		}
	}
	for n := range accounts {
		if _, err := all.of(name(n)).Exec(ctx, `insert into account values ($1, $2)`, name(n), opening); err != nil {
			return all, err
		}
	}
	return all, nil
}

func (s shards) drop() (err error) {
	for _, shard := range s {
		err = errors.Join(err, shard.Drop())
	}
	return err
}

func name(n int) string { return fmt.Sprintf("account-%02d", n%accounts) }

// flow starts the relays and the consumers, hands in the commands, breaks a database, and stops when nothing is on its way.
func (s shards) flow(ctx context.Context, b *broker, f *fault) error {
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("the money is still on its way after two minutes"))
	defer cancel()
	ctx, stop := context.WithCancelCause(ctx)
	var parts sync.WaitGroup
	defer parts.Wait()
	defer stop(nil)
	start := func(part func(context.Context) error) { // an error of one part ends all of them
		parts.Go(func() {
			if err := part(ctx); err != nil {
				stop(err)
			}
		})
	}
	for _, shard := range s {
		relay, err := outbox.NewRelay(shard.Pool, b.publisher(s.credit), outbox.RelayConfig{Lease: 3 * time.Second, Logger: quiet})
		if err != nil {
			return err
		}
		start(relay.Run)
	}
	start(b.consume)
	start(func(ctx context.Context) error { return f.inject(ctx, s) })
	for n := range transfers {
		t := transfer{ID: fmt.Sprintf("transfer-%03d", n), From: name(n), To: name(7*n + 3), Amount: int64(1 + n%5)}
		payload, err := json.Marshal(t)
		if err != nil {
			return err
		}
		b.put(t.ID, payload, s.pay)
	}
	return s.settle(ctx, b, f)
}

// settle comes back when nothing is on its way any more.
func (s shards) settle(ctx context.Context, b *broker, f *fault) error {
	for {
		stored, err := s.stored(ctx)
		if err == nil && stored == 0 && b.open.Load() == 0 && f.over.Load() {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(lookEvery):
		}
	}
}

// stored counts the messages that the relays have still to publish.
func (s shards) stored(ctx context.Context) (all int, err error) {
	for _, shard := range s {
		var n int
		err := shard.QueryRow(ctx, `select (select count(*) from commitbox.outbox_message) + (select count(*) from commitbox.outbox_deferred)`).Scan(&n)
		if err != nil {
			return 0, err
		}
		all += n
	}
	return all, nil
}
