package rabbitmq

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// cancelGrace is how long a handler may take to notice that its context was cancelled.
const cancelGrace = 3 * time.Second

// run is one call of Run. Handlers belong to the run and not to a session: they go on when the connection breaks.
type run struct {
	*Consumer
	handling context.Context // the handlers' context
	cancel   context.CancelFunc
	mover    *sender // publishes to the retry and dead-letter queues, over a connection of its own
	node     int     // index of the URL to try first

	workers sync.WaitGroup // handlers
	active  atomic.Int64   // handlers that have not come back
	held    sync.WaitGroup // deliveries that wait to be requeued
	work    sync.WaitGroup // goroutines of the links
	drained sync.Once
}

func (c *Consumer) newRun(ctx context.Context) *run {
	r := &run{Consumer: c, mover: newSender(c.endpoint, c.cfg.Logger)}
	r.handling, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	return r
}

// drain waits for the handlers: DrainTimeout, and after the cancelling of their context a little longer. It waits once
// and says what did not come back.
func (r *run) drain() error {
	r.drained.Do(func() {
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.workers.Wait()
		}()
		if within(done, r.cfg.DrainTimeout) {
			return
		}
		r.cancel()
		within(done, cancelGrace)
	})
	if n := r.active.Load(); n > 0 {
		return fmt.Errorf("rabbitmq: consumer %s stopped with %d handlers still running; their messages are back in the queue", r.cfg.Name, n)
	}
	return nil
}

func within(done <-chan struct{}, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
		return true
	case <-timer.C:
		return false
	}
}

// end closes what the run holds open.
func (r *run) end() {
	r.cancel()
	r.held.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), closePatience)
	defer cancel()
	_ = r.mover.close(ctx) // the handlers are gone, nothing is on its way
	r.work.Wait()
}
