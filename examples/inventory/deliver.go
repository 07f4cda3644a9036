package main

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/optimistic"
)

// copies is how often every order is delivered, all at the same time.
const copies = 3

// tally counts what the deliveries heard.
type tally struct {
	runs, conflicts, crashes              atomic.Int64 // of handlers
	executed, replayed, busy, again, dead atomic.Int64 // of deliveries
	differing                             atomic.Int64 // copies whose answer is not the first one's
}

// breaking counts the runs of a handler, and makes every fifth order that gets its goods lose the connection once, before they
// are committed.
func (c *tally) breaking(next reserve) reserve {
	var broken sync.Map
	return func(ctx context.Context, tx pgx.Tx, o order) (answer, error) {
		c.runs.Add(1)
		found, err := next(ctx, tx, o)
		if errors.Is(err, optimistic.ErrConflict) {
			c.conflicts.Add(1)
		}
		if err != nil || !found.Reserved || o.ID[len(o.ID)-1]%5 != 0 {
			return found, err
		}
		if _, before := broken.LoadOrStore(o.ID, true); !before {
			c.crashes.Add(1)
			_, err = tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
		}
		return found, err
	}
}

// deliver hands every order to the service in several copies, all of them at once, and each again until it is settled. It
// is the broker of this program.
func (c *tally) deliver(ctx context.Context, orders []order, copies int, serve service) error {
	start, results := make(chan struct{}), make(chan error)
	first := newAnswers()
	for _, o := range orders {
		for range copies {
			go func() {
				<-start
				results <- c.settle(ctx, o, serve, first)
			}()
		}
	}
	close(start)
	var errs []error
	for range len(orders) * copies {
		errs = append(errs, <-results)
	}
	return errors.Join(errs...)
}

// settle delivers one copy until the consumer does not want it again.
func (c *tally) settle(ctx context.Context, o order, serve service, first *answers) error {
	payload, err := json.Marshal(o)
	if err != nil {
		return err
	}
	msg := inbox.Message{ID: inbox.ID{Consumer: consumer, Message: o.ID}, Payload: payload, Fingerprint: inbox.FingerprintOf(payload)}
	for {
		got, err := decode(msg.Payload)
		if err != nil {
			return err
		}
		res, err := serve(ctx, msg, got)
		c.note(res, err)
		if err == nil && first.differs(o.ID, res.Value) {
			c.differing.Add(1)
		}
		if inbox.Disposition(err).Verdict != inbox.Retry {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(redelivery): // a real broker waits as long as it was told to
		}
	}
}

// redelivery is short, so that nobody has to wait for the end of the program.
const redelivery = 20 * time.Millisecond

func (c *tally) note(res inbox.Result[answer], err error) {
	switch {
	case err == nil && res.Replayed:
		c.replayed.Add(1)
	case err == nil:
		c.executed.Add(1)
	case errors.Is(err, inbox.ErrInProgress):
		c.busy.Add(1)
	case errors.Is(err, inbox.ErrDead):
		c.dead.Add(1)
	default:
		c.again.Add(1)
	}
}

// answers remembers the first answer for each order.
type answers struct{ byOrder sync.Map }

func newAnswers() *answers { return &answers{} }

func (a *answers) differs(id string, now answer) bool {
	first, _ := a.byOrder.LoadOrStore(id, now)
	return first != now
}
