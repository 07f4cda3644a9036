package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
	"github.com/commitbox/commitbox/examples/payment/saga"
)

// run is the whole demonstration.
func run(ctx context.Context, cfg config, out io.Writer) (err error) {
	d, err := open(ctx, cfg, out)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.close()) }()
	points, err := d.rehearse(ctx)
	if err != nil {
		return err
	}
	for i, point := range choose(points, cfg.Kills) {
		if err := d.killAt(ctx, i, point); err != nil {
			return err
		}
	}
	for _, after := range shopKills {
		if err := d.killShop(ctx, after); err != nil {
			return err
		}
	}
	if err := d.settle(ctx); err != nil {
		return err
	}
	r, err := d.report(ctx)
	if err != nil {
		return err
	}
	r.write(out)
	return r.verdict()
}

// demo is one run: a database, queues, the payment service and the shop; workers come and go.
type demo struct {
	*customers
	db        *exampledb.DB
	queues    *queues
	provider  string
	env       []string
	children  []*child // the last one is the shop, with the relay
	out       io.Writer
	kills     int
	shopKills int
	started   time.Time
}

func open(ctx context.Context, cfg config, out io.Writer) (*demo, error) {
	db, err := exampledb.Create(ctx, cfg.DatabaseURL, saga.Tables+warehouse)
	if err != nil {
		return nil, err
	}
	d := &demo{
		db: db, queues: &queues{cfg.AMQPURL, db.Name}, out: out, started: time.Now(),
		env:       []string{"DATABASE_URL=" + db.URL, "AMQP_URL=" + cfg.AMQPURL, envName + "=" + db.Name},
		customers: &customers{client: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{}}, pool: db.Pool},
	}
	err = d.queues.declare()
	if err == nil {
		d.provider, err = d.serve(ctx, providerName)
	}
	if err == nil {
		d.env = append(d.env, envProvider+"="+d.provider)
		d.shop, err = d.serve(ctx, shopName)
		d.env = append(d.env, envListen+"="+strings.TrimPrefix(d.shop, "http://")) // for its successors
	}
	if err != nil {
		return nil, errors.Join(err, d.close())
	}
	return d, nil
}

// serve starts a child and returns where it listens.
func (d *demo) serve(ctx context.Context, name string) (string, error) {
	c, err := startChild(name, d.env...)
	if err != nil {
		return "", err
	}
	d.children = append(d.children, c)
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	return c.address(ctx)
}

func (d *demo) close() error {
	d.client.CloseIdleConnections()
	var errs []error
	for _, c := range slices.Backward(d.children) {
		errs = append(errs, c.stop())
	}
	return errors.Join(append(errs, d.queues.remove(), d.db.Drop())...)
}

// worker starts a worker that dies at a point; empty: it lives.
func (d *demo) worker(name, point string) (*child, error) {
	return startChild(name, append(slices.Clone(d.env), envCrash+"="+point)...)
}

// rehearse sells one of each kind and learns at which points a worker can die.
func (d *demo) rehearse(ctx context.Context) ([]string, error) {
	for kind := range kinds {
		if err := d.buy(ctx, kind); err != nil {
			return nil, err
		}
	}
	w, err := d.worker(workerName, listPoints)
	if err != nil {
		return nil, err
	}
	err = d.allEnded(ctx)
	if stopErr := w.stop(); err == nil {
		err = stopErr
	}
	points := w.told(linePoint)
	fmt.Fprintf(d.out, "A worker has %d points to die at. Now it does.\n\n", len(points))
	return points, err
}

// choose takes n of the points, evenly, and always those around the money.
func choose(points []string, n int) (chosen []string) {
	if n == 0 || n >= len(points) {
		return points
	}
	for _, point := range points {
		if strings.Contains(point, "POST ") {
			chosen = append(chosen, point)
		}
	}
	points = slices.DeleteFunc(slices.Clone(points), func(point string) bool { return slices.Contains(chosen, point) })
	chosen = chosen[:min(n, len(chosen))]
	rest := n - len(chosen)
	for i := range rest {
		chosen = append(chosen, points[i*len(points)/rest])
	}
	return chosen
}

// dieWithin is how long a worker has to reach its point. One that does not is killed wherever it is.
const dieWithin = 5 * time.Second

// killAt sells two things and lets a worker die over them.
func (d *demo) killAt(ctx context.Context, round int, point string) error {
	if err := errors.Join(d.buy(ctx, round%2), d.buy(ctx, 1+round%4)); err != nil {
		return err
	}
	w, err := d.worker(workerName, point)
	if err != nil {
		return err
	}
	select {
	case <-ctx.Done():
	case <-w.gone:
	case <-time.After(dieWithin):
	}
	w.kill()
	d.kills++
	where := "wherever it was"
	if told := w.told(lineKilled); len(told) > 0 {
		where = told[0]
	}
	fmt.Fprintf(d.out, "  SIGKILL %2d  %s\n", d.kills, where)
	return context.Cause(ctx)
}

// shopKills says how long after a customer has begun to buy the shop and its relay are killed.
var shopKills = []time.Duration{0, 2 * time.Millisecond, 5 * time.Millisecond, 20 * time.Millisecond}

// killShop kills the API and the relay while a customer buys something. The customer asks again until somebody answers.
func (d *demo) killShop(ctx context.Context, after time.Duration) error {
	bought := make(chan error, 1)
	go func() { bought <- d.buy(ctx, 2) }()
	time.Sleep(after)
	shop := len(d.children) - 1
	d.children[shop].kill()
	d.children = d.children[:shop]
	d.shopKills++
	fmt.Fprintf(d.out, "  SIGKILL %2d  the shop and its relay, %v after a customer came in\n", d.kills+d.shopKills, after)
	_, err := d.serve(ctx, shopName)
	return errors.Join(err, <-bought)
}

// settle lets a last worker finish what the others have left.
func (d *demo) settle(ctx context.Context) error {
	w, err := d.worker(workerName, "")
	if err != nil {
		return err
	}
	return errors.Join(d.allEnded(ctx), w.stop())
}

// stuckAfter is when an order counts as stuck: far longer than leases and backoff.
const stuckAfter = 60 * time.Second

// allEnded waits until no order is open and all events are published.
func (d *demo) allEnded(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, stuckAfter, errors.New("an order is stuck"))
	defer cancel()
	for {
		var left int
		err := d.db.QueryRow(ctx, `select (select count(*) from orders where status = 'open')
			+ (select count(*) from commitbox.outbox_message) + (select count(*) from commitbox.outbox_deferred)
			+ (select count(*) from commitbox.inbox where status <> 'completed')`).Scan(&left)
		if err == nil && left == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (%d left): %w", context.Cause(ctx), left, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
