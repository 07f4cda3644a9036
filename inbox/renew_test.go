package inbox_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// smallBox is a box on a pool of one connection.
func (w *world) smallBox(cfg inbox.Config) (*inbox.Box, *pgxpool.Pool) {
	w.t.Helper()
	config := w.Pool.Config()
	config.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(w.t.Context(), config)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(pool.Close)
	cfg.Logger = quiet
	box, err := inbox.New(pool, cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return box, pool
}

// heard waits until the holder is told that the lease is lost.
func heard(t *testing.T, lease *inbox.Lease) {
	t.Helper()
	bound, cancel := lease.Bind(t.Context())
	defer cancel()
	select {
	case <-bound.Done():
	case <-time.After(patience):
		t.Fatal("the holder was not told")
	}
	if !errors.Is(context.Cause(bound), inbox.ErrLeaseLost) {
		t.Errorf("cause: %v", context.Cause(bound))
	}
}

func TestBusyPoolCostsNoLease(t *testing.T) {
	w := newWorld(t)
	box, pool := w.smallBox(inbox.Config{LeaseFor: leaseFor})
	lease := acquire(t, box, anID)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	first := one[time.Time](w, `select lease_until from commitbox.inbox`)
	w.within(patience, "renewals for longer than the lease", func() bool {
		return one[time.Time](w, `select lease_until from commitbox.inbox`).Sub(first) > leaseFor
	})
	bound, cancel := lease.Bind(t.Context())
	defer cancel()
	if bound.Err() != nil {
		t.Error(context.Cause(bound))
	}
}

func TestCompletingTransactionOutlastsTheLease(t *testing.T) {
	w := newWorld(t)
	box, _ := w.smallBox(inbox.Config{LeaseFor: time.Second})
	boom := errors.New("boom")
	fail := true
	complete := func(ctx context.Context, lease *inbox.Lease) (int, error) {
		return inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (int, error) {
			bound, cancel := lease.Bind(ctx)
			defer cancel()
			if _, err := tx.Exec(bound, `select pg_sleep(2.5)`); err != nil {
				return 0, err
			}
			if fail {
				return 0, boom
			}
			return 1, write(bound, tx, anID, "")
		})
	}
	res, err := inbox.ProcessLeased(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, lease *inbox.Lease) (int, error) {
		if _, err := complete(ctx, lease); !errors.Is(err, boom) {
			t.Errorf("the transaction that rolls back: %v", err)
		}
		if one[bool](w, `select lease_until < clock_timestamp() from commitbox.inbox`) {
			t.Error("the lease was not renewed when the transaction had ended")
		}
		fail = false
		return complete(ctx, lease)
	})
	if err != nil || res.Value != 1 {
		t.Errorf("%+v, %v", res, err)
	}
	w.wantEffects(anID, 1)
}

// Without an answer of the store the holder stops before another one may begin.
func TestHolderHearsOfTheLossBeforeTheLeaseExpires(t *testing.T) {
	w, box, proxy := proxied(t, inbox.Config{LeaseFor: leaseFor})
	lease := acquire(t, box, anID)
	proxy.BlackHole(testenv.ToServer)
	proxy.BlackHole(testenv.ToClient)
	heard(t, lease)
	if one[bool](w, `select lease_until <= clock_timestamp() from commitbox.inbox`) {
		t.Error("the holder heard of it after the lease had expired")
	}
	proxy.Heal()
}

// A row that somebody else has locked is no renewal: the lock may be that of a successor who has not committed yet.
func TestLockOfAnotherDoesNotProlongTheLease(t *testing.T) {
	w := newWorld(t)
	lease := acquire(t, w.box(inbox.Config{LeaseFor: leaseFor}), anID)
	tx := w.begin()
	if _, err := tx.Exec(t.Context(), `select from commitbox.inbox for no key update`); err != nil {
		t.Fatal(err)
	}
	heard(t, lease)
	if one[bool](w, `select lease_until <= clock_timestamp() from commitbox.inbox`) {
		t.Error("the holder heard of it after the lease had expired")
	}
}

// The connections for renewals are gone with the last lease that needed them.
func TestRenewalsCloseTheirConnections(t *testing.T) {
	w := newWorld(t)
	box, _ := w.smallBox(inbox.Config{LeaseFor: time.Second})
	connections := func() int {
		return one[int](w, `select count(*)::int from pg_stat_activity where datname = current_database() and query like '-- name: InboxRenew %'`)
	}
	first, second := acquire(t, box, inbox.ID{Consumer: "c", Message: "1"}), acquire(t, box, inbox.ID{Consumer: "c", Message: "2"})
	w.within(patience, "a renewal", func() bool { return connections() > 0 })
	if _, err := inbox.Complete(t.Context(), first, 1); err != nil {
		t.Fatal(err)
	}
	if _, err := inbox.Complete(t.Context(), second, 1); err != nil {
		t.Fatal(err)
	}
	w.within(patience, "no connection", func() bool { return connections() == 0 })
}
