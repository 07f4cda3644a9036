package sqltx_test

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	entsql "entgo.io/ent/dialect/sql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/jmoiron/sqlx"
	_ "github.com/lib/pq" // the driver "postgres"
	"github.com/uptrace/bun"
	"github.com/uptrace/bun/dialect/pgdialect"
	"gorm.io/driver/postgres"
	"gorm.io/gorm"
	"gorm.io/gorm/logger"

	"github.com/commitbox/commitbox/integration/sqltx/ent"
	"github.com/commitbox/commitbox/sqltx"
)

// begin begins a transaction of a stack, and returns with it how an effect is written in it.
type begin func(ctx context.Context, options *sql.TxOptions) (tx sqltx.Tx, add func(ctx context.Context, note string) error, err error)

type stack struct {
	name    string
	connect func(t *testing.T, url string) begin
}

var stacks = []stack{
	{"database/sql on pgx", on(overPGX(pgx.QueryExecModeCacheStatement), plain)},
	{"database/sql on pgx, exec mode", on(overPGX(pgx.QueryExecModeExec), plain)},
	{"database/sql on pgx, simple protocol", on(overPGX(pgx.QueryExecModeSimpleProtocol), plain)},
	{"database/sql on lib/pq", on(overPQ(""), plain)},
	{"database/sql on lib/pq, binary parameters", on(overPQ("&binary_parameters=yes"), plain)},
	{"sqlx on pgx", on(overPGX(pgx.QueryExecModeCacheStatement), withSQLX)},
	{"sqlx on lib/pq", on(overPQ(""), withSQLX)},
	{"GORM", on(overPGX(pgx.QueryExecModeCacheStatement), withGORM(false))},
	{"GORM with PrepareStmt", on(overPGX(pgx.QueryExecModeCacheStatement), withGORM(true))},
	{"GORM with PrepareStmt on lib/pq", on(overPQ(""), withGORM(true))},
	{"bun on pgx", on(overPGX(pgx.QueryExecModeCacheStatement), withBun)},
	{"bun on lib/pq", on(overPQ(""), withBun)},
	{"ent on pgx", on(overPGX(pgx.QueryExecModeCacheStatement), withEnt)},
	{"ent on lib/pq", on(overPQ(""), withEnt)},
}

// on joins a driver with a library.
func on(driver func(t *testing.T, url string) *sql.DB, library func(t *testing.T, db *sql.DB) begin) func(*testing.T, string) begin {
	return func(t *testing.T, url string) begin {
		t.Helper()
		db := driver(t, url)
		t.Cleanup(func() { _ = db.Close() })
		return library(t, db)
	}
}

func overPGX(mode pgx.QueryExecMode) func(*testing.T, string) *sql.DB {
	return func(t *testing.T, url string) *sql.DB {
		t.Helper()
		config, err := pgx.ParseConfig(url)
		if err != nil {
			t.Fatal(err)
		}
		config.DefaultQueryExecMode = mode
		return stdlib.OpenDB(*config)
	}
}

func overPQ(options string) func(*testing.T, string) *sql.DB {
	return func(t *testing.T, url string) *sql.DB {
		t.Helper()
		if !strings.Contains(url, "?") {
			url += "?sslmode=disable"
		}
		db, err := sql.Open("postgres", url+options)
		if err != nil {
			t.Fatal(err)
		}
		return db
	}
}

const insert = `insert into effects (note) values ($1)`

func plain(_ *testing.T, db *sql.DB) begin {
	return func(ctx context.Context, options *sql.TxOptions) (sqltx.Tx, func(context.Context, string) error, error) {
		tx, err := db.BeginTx(ctx, options)
		return tx, func(ctx context.Context, note string) error {
			_, err := tx.ExecContext(ctx, insert, note)
			return err
		}, err
	}
}

func withSQLX(_ *testing.T, db *sql.DB) begin {
	return func(ctx context.Context, options *sql.TxOptions) (sqltx.Tx, func(context.Context, string) error, error) {
		tx, err := sqlx.NewDb(db, "postgres").BeginTxx(ctx, options)
		return tx, func(ctx context.Context, note string) error {
			_, err := tx.NamedExecContext(ctx, `insert into effects (note) values (:note)`, map[string]any{"note": note})
			return err
		}, err
	}
}

// Effect is a row for GORM and bun.
type Effect struct {
	bun.BaseModel `bun:"table:effects" gorm:"-"`
	ID            int64 `bun:",pk,autoincrement" gorm:"primaryKey"`
	Note          string
}

func withGORM(prepared bool) func(*testing.T, *sql.DB) begin {
	return func(t *testing.T, db *sql.DB) begin {
		t.Helper()
		g, err := gorm.Open(postgres.New(postgres.Config{Conn: db}), &gorm.Config{
			Logger: logger.Discard, PrepareStmt: prepared,
			PrepareStmtTTL: 10 * 365 * 24 * time.Hour, // with any other, GORM starts a goroutine that never ends
		})
		if err != nil {
			t.Fatal(err)
		}
		return func(ctx context.Context, options *sql.TxOptions) (sqltx.Tx, func(context.Context, string) error, error) {
			tx := g.WithContext(ctx).Begin(options)
			if tx.Error != nil {
				return nil, nil, tx.Error
			}
			return tx.Statement.ConnPool.(gorm.Tx), func(ctx context.Context, note string) error {
				return tx.WithContext(ctx).Create(&Effect{Note: note}).Error
			}, nil
		}
	}
}

func withBun(_ *testing.T, db *sql.DB) begin {
	return func(ctx context.Context, options *sql.TxOptions) (sqltx.Tx, func(context.Context, string) error, error) {
		tx, err := bun.NewDB(db, pgdialect.New()).BeginTx(ctx, options)
		return tx.Tx, func(ctx context.Context, note string) error {
			_, err := tx.NewInsert().Model(&Effect{Note: note}).Exec(ctx)
			return err
		}, err
	}
}

func withEnt(_ *testing.T, db *sql.DB) begin {
	return func(ctx context.Context, options *sql.TxOptions) (sqltx.Tx, func(context.Context, string) error, error) {
		tx, err := ent.NewClient(ent.Driver(entsql.OpenDB("postgres", db))).BeginTx(ctx, options)
		return tx, func(ctx context.Context, note string) error {
			return tx.Effect.Create().SetNote(note).Exec(ctx)
		}, err
	}
}
