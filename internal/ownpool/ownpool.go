// Package ownpool opens a small pool beside the caller's, so that background work neither starves the caller's
// connections nor is starved by them.
package ownpool

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Open returns a pool of at most maxConns connections with the settings and hooks of pool. Statements run in the given
// mode, unless the caller's pool is set to a mode without prepared statements: that one is kept, because it was chosen
// for what stands between here and the server.
func Open(ctx context.Context, pool *pgxpool.Pool, maxConns int32, mode pgx.QueryExecMode) (*pgxpool.Pool, error) {
	cfg := pool.Config()
	cfg.MaxConns, cfg.MinConns, cfg.MinIdleConns = maxConns, 0, 0
	switch cfg.ConnConfig.DefaultQueryExecMode {
	case pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol:
	default:
		cfg.ConnConfig.DefaultQueryExecMode = mode
	}
	return pgxpool.NewWithConfig(ctx, cfg)
}
