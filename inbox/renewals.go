package inbox

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/ownpool"
)

// renewalConns is enough for many leases, because a renewal is one short statement.
const renewalConns = 2

// renewals is a box's pool for renewals: with the caller's, a busy pool would cost a lease. It is open while a lease
// uses it.
type renewals struct {
	mu    sync.Mutex
	users int
	pool  *pgxpool.Pool
}

// join returns the pool, which stays open until leave has been called as often.
func (r *renewals) join(ctx context.Context, callers *pgxpool.Pool) (*pgxpool.Pool, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.pool == nil {
		pool, err := ownpool.Open(ctx, callers, renewalConns, pgx.QueryExecModeCacheDescribe)
		if err != nil {
			return nil, err
		}
		r.pool = pool
	}
	r.users++
	return r.pool, nil
}

func (r *renewals) leave() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.users--; r.users == 0 {
		r.pool.Close()
		r.pool = nil
	}
}
