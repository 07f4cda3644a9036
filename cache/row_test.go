package cache_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// TestB44_TheRowDecidesWithoutTheLock takes the lock away while its holder works, as a failover, an eviction or a flush
// does: the next one gets it, and still there is one effect.
func TestB44_TheRowDecidesWithoutTheLock(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	_, err := db.Pool.Exec(t.Context(), `create table effect (who text)`)
	must(t, err)
	box, err := inbox.New(db.Pool, inbox.Config{Logger: quiet})
	must(t, err)
	s := private(t)
	client := connect(t, s.URL())
	l := newLocker(t, client, cache.LockConfig{Lease: time.Minute})
	id := newID()
	handle := func(who string, inside func()) error {
		_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			_, err := tx.Exec(ctx, `insert into effect values ($1)`, who)
			inside()
			return inbox.Void{}, err
		})
		return err
	}
	first := acquire(t, l, id.Message)
	must(t, handle("first", func() {
		must(t, client.FlushAll(t.Context()).Err())
		second := acquire(t, l, id.Message)
		if err := handle("second", func() { t.Error("the handler runs twice at the same time") }); !errors.Is(err, inbox.ErrInProgress) {
			t.Errorf("the second holder of the lock is told %v", err)
		}
		must(t, second.Release())
	}))
	if err := first.Release(); !errors.Is(err, cache.ErrLockLost) {
		t.Errorf("Release says %v", err)
	}
	must(t, handle("second", func() { t.Error("the handler runs again") }))
	var effects int
	must(t, db.Pool.QueryRow(t.Context(), `select count(*) from effect`).Scan(&effects))
	if effects != 1 {
		t.Errorf("%d effects, want 1", effects)
	}
}
