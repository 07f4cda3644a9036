package testenv

import (
	"context"
	"fmt"
	"net/url"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// poolSize bounds the connections of one [DB.Pool]. They are opened on demand.
const poolSize = 16

// DB is a database of one test on the shared PostgreSQL. It is dropped when the
// test ends, together with whatever sessions are left in it.
type DB struct {
	Name string
	URL  string        // direct, not through a pooler
	Pool *pgxpool.Pool // at most 16 connections; closed when the test ends
}

// Database returns a new database with all migrations applied.
func Database(t testing.TB) *DB {
	t.Helper()
	return newDatabase(t, func(ctx context.Context, a *admin) (string, error) { return a.createMigrated(ctx) })
}

// EmptyDatabase returns a new database without any object of the library.
func EmptyDatabase(t testing.TB) *DB {
	t.Helper()
	return newDatabase(t, func(ctx context.Context, a *admin) (string, error) { return a.createFrom(ctx, "template0") })
}

// Bouncer returns the database's URL through PgBouncer: transaction mode, two
// server connections per database. Prepared statements do not work there, so a
// pgx client sets default_query_exec_mode to exec or cache_describe.
func (db *DB) Bouncer(t testing.TB) string {
	t.Helper()
	address, err := sharedBouncer.address()
	if err != nil {
		t.Fatal(err)
	}
	through, err := withDatabase(address, db.Name)
	if err != nil {
		t.Fatal(err)
	}
	return through
}

func newDatabase(t testing.TB, create func(context.Context, *admin) (string, error)) *DB {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	a, err := openAdmin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	name, err := create(ctx, a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { drop(t, a, name) })
	db := &DB{Name: name}
	if db.URL, err = withDatabase(a.url, name); err != nil {
		t.Fatal(err)
	}
	db.Pool = newPool(t, db.URL)
	return db
}

func drop(t testing.TB, a *admin, name string) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := a.drop(ctx, name); err != nil {
		t.Error(err)
	}
}

func newPool(t testing.TB, url string, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = poolSize
	for _, option := range options {
		option(config)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closePool(t, pool) })
	return pool
}

// closePool reports a connection that the test never gave back: closing would
// wait for it for ever.
func closePool(t testing.TB, pool *pgxpool.Pool) {
	closed := make(chan struct{})
	go func() {
		pool.Close()
		close(closed)
	}()
	select {
	case <-closed:
	case <-time.After(10 * time.Second):
		t.Errorf("testenv: %d connections of the pool were not released by the test", pool.Stat().AcquiredConns())
	}
}

// withDatabase returns a server's URL with another database in it.
func withDatabase(server, name string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Host == "" {
		return "", fmt.Errorf("testenv: the address of PostgreSQL must be a URL (postgres://user@host:port/database)")
	}
	u.Path = "/" + name
	return u.String(), nil
}
