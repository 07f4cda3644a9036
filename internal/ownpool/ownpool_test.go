package ownpool_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/ownpool"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func open(t *testing.T, pool *pgxpool.Pool, maxConns int32, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	own, err := ownpool.Open(t.Context(), pool, maxConns, mode)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(own.Close)
	return own
}

func TestModeThatTheCallerChoseIsKeptIfNothingIsPrepared(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	for callers, want := range map[pgx.QueryExecMode]pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement: pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeCacheDescribe:  pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeDescribeExec:   pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeExec:           pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol: pgx.QueryExecModeSimpleProtocol,
	} {
		cfg := db.Pool.Config()
		cfg.ConnConfig.DefaultQueryExecMode = callers
		pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		if got := open(t, pool, 1, pgx.QueryExecModeCacheDescribe).Config().ConnConfig.DefaultQueryExecMode; got != want {
			t.Errorf("the caller's pool has mode %v: got %v, want %v", callers, got, want)
		}
		if pool.Config().ConnConfig.DefaultQueryExecMode != callers {
			t.Errorf("the caller's pool has changed from mode %v", callers)
		}
	}
}

// The pool has its own bound and the caller's settings and hooks.
func TestPoolIsSmallAndLikeTheCallers(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	cfg := db.Pool.Config()
	cfg.MinConns, cfg.MinIdleConns = 3, 3
	cfg.ConnConfig.RuntimeParams["application_name"] = "the caller's"
	hooked := make(chan struct{}, 10)
	cfg.AfterConnect = func(context.Context, *pgx.Conn) error {
		hooked <- struct{}{}
		return nil
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)

	own := open(t, pool, 2, pgx.QueryExecModeExec)
	if c := own.Config(); c.MaxConns != 2 || c.MinConns != 0 || c.MinIdleConns != 0 {
		t.Errorf("%d to %d connections, %d idle", c.MinConns, c.MaxConns, c.MinIdleConns)
	}
	var name string
	if err := own.QueryRow(t.Context(), "select current_setting('application_name')").Scan(&name); err != nil || name != "the caller's" {
		t.Errorf("application_name is %q, %v", name, err)
	}
	if len(hooked) == 0 {
		t.Error("the caller's hook was not called")
	}
}

// Work on the own pool goes on while all of the caller's connections are taken, and after the caller's pool is closed.
func TestPoolDoesNotDependOnTheCallers(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	cfg := db.Pool.Config()
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	own := open(t, pool, 1, pgx.QueryExecModeExec)
	if err := own.Ping(t.Context()); err != nil {
		t.Errorf("while the caller's pool is used up: %v", err)
	}
	conn.Release()
	pool.Close()
	if err := own.Ping(t.Context()); err != nil {
		t.Errorf("after the caller's pool was closed: %v", err)
	}
}
