package inbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/db"
)

// term is how long a lease lasts for certain, by this process's clock.
type term struct {
	mu    sync.Mutex
	until time.Time
	open  int // completing transactions that are open: their lock on the row keeps others away, whatever the time is
}

// extend counts from when a request was sent that was granted, and leaves a tenth of the time for its holder to stop.
func (t *term) extend(sent time.Time, lease time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if until := sent.Add(lease - lease/10); until.After(t.until) {
		t.until = until
	}
}

func (t *term) lock() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open++
}

func (t *term) unlock() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.open--
}

// expired says that others may have taken the lease.
func (t *term) expired() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.open == 0 && !time.Now().Before(t.until)
}

// within cuts d to what is left of the term.
func (t *term) within(d time.Duration) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.open > 0 {
		return d
	}
	return min(d, time.Until(t.until))
}

// renew moves the lease's end, until the lease ends or is lost. A store that does not answer is asked more often; a
// lease that may have expired counts as lost.
func (l *Lease) renew() {
	defer close(l.halted)
	period := l.box.LeaseFor / 3
	if !sleep(l.ctx, period) {
		return
	}
	pool, err := l.box.renewals.join(context.WithoutCancel(l.ctx), l.box.pool)
	if err != nil {
		l.stop(fmt.Errorf("%w: no connection for renewals: %w", ErrLeaseLost, err))
		return
	}
	defer l.box.renewals.leave()
	for l.ctx.Err() == nil {
		pause := period
		held, err := l.renewOnce(pool, l.term.within(period))
		switch {
		case err == nil && !held:
			l.stop(ErrLeaseLost)
			return
		case err != nil && l.term.expired():
			l.stop(fmt.Errorf("%w: it could not be renewed in time: %w", ErrLeaseLost, err))
			return
		case err != nil:
			pause = period / 4
		}
		sleep(l.ctx, l.term.within(pause))
	}
}

// renewOnce says whether the lease is held; an error says that this is not known, or that it was not renewed.
func (l *Lease) renewOnce(pool *pgxpool.Pool, limit time.Duration) (held bool, err error) {
	ctx, cancel := context.WithTimeout(l.ctx, limit)
	defer cancel()
	n, err := l.touch(ctx, pool)
	if err != nil || n > 0 {
		return n > 0, err
	}
	row, err := l.held(ctx, pool)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return false, nil
	case err != nil:
		return false, err
	case row.Status != statusPending || !row.Same:
		return false, nil
	}
	return true, errRowLocked
}

// touch moves the end of the lease, and returns 0 if it is lost or its row is locked.
func (l *Lease) touch(ctx context.Context, on db.DBTX) (int64, error) {
	sent := time.Now()
	n, err := l.queries(on).InboxRenew(ctx, db.InboxRenewParams{
		Consumer: l.msg.ID.Consumer, MessageID: l.msg.ID.Message, Epoch: l.epoch, Token: l.token, LeaseSeconds: l.box.LeaseFor.Seconds(),
	})
	if err == nil && n > 0 {
		l.term.extend(sent, l.box.LeaseFor)
	}
	return n, err
}

// reclaim renews the lease after a completing transaction of its own was rolled back: until then its lock was the lease,
// and the time may have run out meanwhile. The clock counts again only after that.
func (l *Lease) reclaim(ctx context.Context, on db.DBTX) {
	if l.ctx.Err() != nil {
		l.term.unlock()
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), min(cleanupTimeout, l.box.LeaseFor/3))
	defer cancel()
	_, err := l.touch(ctx, on)
	l.term.unlock()
	if l.term.expired() {
		l.stop(errors.Join(ErrLeaseLost, err))
	}
}
