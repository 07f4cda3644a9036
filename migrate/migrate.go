// Package migrate creates and upgrades the tables of commitbox with goose.
//
// The version table and the migrators' lock live in the library's own schema, and goose is used without its package
// globals, so that the application's own goose history is not touched. Any number of replicas may call [Up] at once, on
// an empty database and through a transaction pooler too: one works, the others wait and then find nothing to do. The
// lock is a row with a lease: if its holder dies, the others go on within 15 seconds.
package migrate

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/database"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/ownpool"
	"github.com/commitbox/commitbox/internal/schema"
	"github.com/commitbox/commitbox/migrations"
)

// Config says where the tables live. The zero value is usable.
type Config struct {
	Schema string       // default "commitbox"; must match ^[a-z_][a-z0-9_]{0,47}$ and not begin with pg_
	Logger *slog.Logger // gets one line per migration that is run; default: no log
}

// Migration is one step of the schema's history.
type Migration struct {
	Version   int64
	Name      string    // the file's name
	AppliedAt time.Time // zero while it is pending
}

// Up applies all pending migrations. It opens connections of its own with the settings of pool, so that pool may be of
// any size; the role needs CREATE on the schema, and on the database if the schema does not exist yet. Calling it again
// is harmless. An error leaves every migration either applied whole or not at all.
func Up(ctx context.Context, pool *pgxpool.Pool, cfg Config) error {
	return run(ctx, pool, cfg, func(ctx context.Context, p *goose.Provider) ([]*goose.MigrationResult, error) {
		done, err := p.Up(ctx)
		if partial := (*goose.PartialError)(nil); errors.As(err, &partial) {
			done = partial.Applied
		}
		return done, err
	})
}

// Down takes the newest applied migration back, with the data in its tables. It does nothing if none is applied. The
// schema itself, the version table and the lock stay.
func Down(ctx context.Context, pool *pgxpool.Pool, cfg Config) error {
	return run(ctx, pool, cfg, func(ctx context.Context, p *goose.Provider) ([]*goose.MigrationResult, error) {
		done, err := p.Down(ctx)
		switch {
		case errors.Is(err, goose.ErrNoNextVersion):
			return nil, nil
		case err != nil:
			return nil, err
		}
		return []*goose.MigrationResult{done}, nil
	})
}

// Status lists all migrations in order, applied or pending. It changes nothing, and works for a role that can only read.
func Status(ctx context.Context, pool *pgxpool.Pool, cfg Config) ([]Migration, error) {
	m, err := open(ctx, pool, cfg)
	if err != nil {
		return nil, err
	}
	defer m.close()
	exists, err := m.queries.RelationExists(ctx, m.schema.Qualify(versionTable))
	if err != nil {
		return nil, fmt.Errorf("migrate: look for the version table: %w", err)
	}
	var list []Migration
	if !exists {
		for _, s := range m.provider.ListSources() {
			list = append(list, Migration{Version: s.Version, Name: s.Path})
		}
		return list, nil
	}
	states, err := m.provider.Status(ctx)
	if err != nil {
		return nil, fmt.Errorf("migrate: status: %w", err)
	}
	for _, s := range states {
		list = append(list, Migration{Version: s.Source.Version, Name: s.Source.Path, AppliedAt: s.AppliedAt})
	}
	return list, nil
}

const versionTable = "goose_version"

// step moves the schema and returns the migrations that it has run.
type step func(context.Context, *goose.Provider) ([]*goose.MigrationResult, error)

// run calls do with the migrators' lock held.
func run(ctx context.Context, pool *pgxpool.Pool, cfg Config, do step) error {
	m, err := open(ctx, pool, cfg)
	if err != nil {
		return err
	}
	defer m.close()
	if err := m.bootstrap(ctx); err != nil {
		return fmt.Errorf("migrate: prepare schema %s: %w", m.schema, err)
	}
	err = m.locked(ctx, func(ctx context.Context) error {
		done, err := do(ctx, m.provider)
		logMigrations(ctx, cfg.Logger, m.schema, done)
		return err
	})
	if err != nil {
		return fmt.Errorf("migrate: schema %s: %w", m.schema, err)
	}
	return nil
}

func logMigrations(ctx context.Context, log *slog.Logger, name schema.Name, done []*goose.MigrationResult) {
	if log == nil {
		return
	}
	for _, r := range done {
		log.InfoContext(ctx, "migrate: migration run", "schema", name.String(), "migration", r.Source.Path,
			"direction", r.Direction, "duration", r.Duration)
	}
}

// migrator is one call's connections and tools.
type migrator struct {
	schema   schema.Name
	pool     *pgxpool.Pool
	sql      *sql.DB
	queries  *db.Queries
	provider *goose.Provider
}

// connections is what one call uses at most: goose's session and its transaction, and the renewal of the lock.
const connections = 3

func open(ctx context.Context, pool *pgxpool.Pool, cfg Config) (*migrator, error) {
	name, err := schema.Parse(cfg.Schema)
	if pool == nil {
		err = errors.Join(&commitbox.InputError{Field: "pool", Problem: "is nil"}, err)
	}
	if err != nil {
		return nil, fmt.Errorf("migrate: %w", err)
	}
	own, err := ownpool.Open(ctx, pool, connections, pgx.QueryExecModeExec)
	if err != nil {
		return nil, fmt.Errorf("migrate: open connections: %w", err)
	}
	m := &migrator{schema: name, pool: own, sql: stdlib.OpenDBFromPool(own), queries: db.New(name.On(own))}
	if m.provider, err = m.newProvider(); err != nil {
		m.close()
		return nil, fmt.Errorf("migrate: %w", err)
	}
	return m, nil
}

func (m *migrator) newProvider() (*goose.Provider, error) {
	table, err := database.NewStore(database.DialectPostgres, m.schema.Qualify(versionTable))
	if err != nil {
		return nil, err
	}
	return goose.NewProvider(goose.DialectCustom, m.sql, m.schema.FS(migrations.FS),
		goose.WithStore(store{table, m.queries}), goose.WithDisableGlobalRegistry(true), goose.WithSlog(slog.New(slog.DiscardHandler)))
}

func (m *migrator) close() {
	m.sql.Close()
	m.pool.Close()
}

// store is goose's version table under a quoted name: goose looks for a table by comparing its name with the catalogue
// as text, quotes included, and would never find one in a schema whose name has to be quoted.
type store struct {
	database.Store
	queries *db.Queries
}

func (s store) TableExists(ctx context.Context, _ database.DBTxConn) (bool, error) {
	return s.queries.RelationExists(ctx, s.Tablename())
}
