package bench

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"runtime"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// database is a durable PostgreSQL that was started for one family, with the library's tables in it.
type database struct {
	url   string
	facts string // what it is and how it is set
}

// peerSchema has the same tables as the library's schema, for the contenders that are written by hand.
const peerSchema = "peer"

// startDatabase starts a server. Its settings differ from PostgreSQL's defaults in the memory that it may use and in
// the WAL between two checkpoints, so that none falls into a round by chance.
func startDatabase(b *testing.B) *database {
	b.Helper()
	s := testenv.PrivatePostgres(b, devserver.PostgresOptions{Durable: true, Settings: map[string]string{
		"shared_buffers":     cmp.Or(os.Getenv("BENCH_SHARED_BUFFERS"), "512MB"),
		"max_wal_size":       "8GB",
		"checkpoint_timeout": "30min",
	}})
	db := &database{url: s.URL()}
	pool := db.pool(b, 2)
	for _, schema := range []string{"", peerSchema} {
		if err := migrate.Up(b.Context(), pool, migrate.Config{Schema: schema}); err != nil {
			b.Fatal(err)
		}
	}
	run(b, pool, `create table public.business (id bigint generated always as identity primary key, value bytea not null)`)
	db.facts = describe(b, pool)
	return db
}

func describe(b *testing.B, pool *pgxpool.Pool) string {
	b.Helper()
	var version, buffers, wal, fsync, commit string
	err := pool.QueryRow(b.Context(), `select current_setting('server_version'), current_setting('shared_buffers'),
		current_setting('max_wal_size'), current_setting('fsync'), current_setting('synchronous_commit')`).
		Scan(&version, &buffers, &wal, &fsync, &commit)
	if err != nil {
		b.Fatal(err)
	}
	return fmt.Sprintf("PostgreSQL %s, shared_buffers %s, max_wal_size %s, fsync %s, synchronous_commit %s; %s, %d cores for client and server",
		version, buffers, wal, fsync, commit, runtime.Version(), runtime.NumCPU())
}

// pool returns a pool that keeps its connections open and does not ping them. Options change its configuration.
func (db *database) pool(b *testing.B, conns int32, options ...func(*pgxpool.Config)) *pgxpool.Pool {
	b.Helper()
	cfg, err := pgxpool.ParseConfig(db.url)
	if err != nil {
		b.Fatal(err)
	}
	cfg.MaxConns, cfg.MinConns = conns, 0
	cfg.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	for _, option := range options {
		option(cfg)
	}
	pool, err := pgxpool.NewWithConfig(b.Context(), cfg)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(pool.Close)
	return pool
}

// run executes one statement.
func run(b *testing.B, pool *pgxpool.Pool, sql string, args ...any) {
	b.Helper()
	if _, err := pool.Exec(b.Context(), sql, args...); err != nil {
		b.Fatal(err)
	}
}

// count returns the one number that a query answers.
func count(b *testing.B, pool *pgxpool.Pool, sql string, args ...any) (n int) {
	b.Helper()
	if err := pool.QueryRow(b.Context(), sql, args...).Scan(&n); err != nil {
		b.Fatal(err)
	}
	return n
}

var payload = bytes.Repeat([]byte("0123456789"), payloadLen/10)

const insertBusiness = `insert into public.business (value) values ($1)`

// changeBusiness is the business change of a transaction.
func changeBusiness(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, insertBusiness, payload)
	return err
}
