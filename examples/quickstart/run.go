package main

import (
	"context"
	_ "embed"
	"errors"
	"io"
	"time"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
)

//go:embed tables.sql
var tables string

// run is the whole demonstration. Its result goes to out, progress to status.
func run(ctx context.Context, cfg config, out, status io.Writer) (err error) {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	db, err := exampledb.Create(ctx, cfg.DatabaseURL, tables)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Drop()) }()

	d := &demo{cfg: cfg, db: db, tally: newTally(), started: time.Now()}
	start, remove, err := d.connect()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, remove()) }()
	d.components = newSupervisor(start, fail)
	defer func() { err = errors.Join(err, d.components.stop(relayName, paymentsName, timelineName)) }()

	d.progress = showProgress(status, cfg.Orders, d.tally, d.paid)
	err = d.flow(ctx)
	d.progress.stop()
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if err != nil && !errors.Is(err, errStuck) {
		return err
	}
	r, reportErr := d.report(ctx)
	if reportErr != nil {
		return errors.Join(err, reportErr)
	}
	return errors.Join(err, r.write(out), r.verdict())
}

// errStuck ends a flow that has stopped before its end. What it did is counted all the same.
var errStuck = errors.New("nothing moved for a long time, and the flow is not at its end")

// demo is one run.
type demo struct {
	cfg        config
	db         *exampledb.DB
	broker     broker
	components *supervisor
	tally      *tally
	progress   *progress
	started    time.Time
}

// connect prepares the broker and says how a component is started: with RabbitMQ as a child process, else in this one.
func (d *demo) connect() (start func(string) (process, error), remove func() error, err error) {
	if d.cfg.Broker == "memory" {
		d.broker = newMemory()
		start = func(name string) (process, error) {
			return startGoroutines(name, d.db.URL, d.broker, d.tally.note)
		}
		return start, func() error { return nil }, nil
	}
	r := &rabbit{url: d.cfg.AMQPURL, name: d.db.Name}
	if err := r.declare(); err != nil {
		return nil, nil, err
	}
	d.broker = r
	env := []string{"DATABASE_URL=" + d.db.URL, "AMQP_URL=" + r.url, "QUICKSTART_NAME=" + r.name}
	start = func(name string) (process, error) { return startChild(name, env, d.tally.note) }
	return start, r.remove, nil
}

// flow places the orders while components are killed, waits until everything has come to rest, and stops them.
func (d *demo) flow(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if err := d.components.launch(relayName, paymentsName, timelineName); err != nil {
		return err
	}
	end := func(err error) error { // an error of one ends the other
		if err != nil {
			cancel()
		}
		return err
	}
	results := make(chan error, 2)
	go func() { results <- end(placeOrders(ctx, d.db.Pool, d.cfg.Orders)) }()
	go func() { results <- end(d.inject(ctx)) }()
	if err := errors.Join(<-results, <-results); err != nil {
		return err
	}
	return d.settle(ctx)
}

// settle waits until everything has come to rest and stops the components. What they hand back then is handled before
// it returns.
func (d *demo) settle(ctx context.Context) error {
	for {
		if err := errors.Join(d.rest(ctx), d.components.stop(relayName, paymentsName, timelineName)); err != nil {
			return err
		}
		left, err := d.open(ctx)
		if err != nil || left == 0 {
			return err
		}
		if err := d.components.launch(relayName, paymentsName, timelineName); err != nil {
			return err
		}
	}
}

const (
	restFor   = time.Second      // nothing moved for so long, and nothing is open: everything has come to rest
	stuckFor  = 60 * time.Second // nothing moved for so long: something is wrong
	lookEvery = 100 * time.Millisecond
)

// rest comes back when nothing moves any more. It does not look at the effects: whether something was lost is for the
// report to find out.
func (d *demo) rest(ctx context.Context) error {
	return d.await(ctx, lookEvery, func(_ counts, still time.Duration) (bool, error) {
		left, err := d.open(ctx)
		return left == 0 && still > restFor, err
	})
}

// await looks at the tally again and again until done says so, or until nothing has moved for too long. done is told
// for how long nothing has.
func (d *demo) await(ctx context.Context, every time.Duration, done func(c counts, still time.Duration) (bool, error)) error {
	last, since := d.tally.counts(), time.Now()
	for {
		c := d.tally.counts()
		if c != last {
			last, since = c, time.Now()
		}
		still := time.Since(since)
		if ok, err := done(c, still); ok || err != nil {
			return err
		}
		if still > stuckFor {
			return errStuck
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(every):
		}
	}
}

// paid counts the orders that have a payment.
func (d *demo) paid() (n int, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err = d.db.QueryRow(ctx, `select count(distinct order_id) from payments`).Scan(&n)
	return n, err
}

// open counts what is on its way: messages in the outbox and deliveries in queues.
func (d *demo) open(ctx context.Context) (int, error) {
	var stored int
	err := d.db.QueryRow(ctx, `select (select count(*) from commitbox.outbox_message)
		+ (select count(*) from commitbox.outbox_deferred)`).Scan(&stored)
	if err != nil {
		return 0, err
	}
	queued, err := d.broker.waiting(ctx)
	return stored + queued, err
}
