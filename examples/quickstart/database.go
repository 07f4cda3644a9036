package main

import (
	"context"
	"crypto/rand"
	_ "embed"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/migrate"
)

//go:embed tables.sql
var tables string

// database is a database of this run's own.
type database struct {
	*pgxpool.Pool
	name, url string
	serverURL string
}

// createDatabase makes a database with the tables of commitbox and of the services.
func createDatabase(ctx context.Context, serverURL string) (*database, error) {
	name := "commitbox_quickstart_" + strings.ToLower(rand.Text()[:8])
	if err := onServer(ctx, serverURL, "create database "+name); err != nil {
		return nil, err
	}
	db := &database{name: name, serverURL: serverURL}
	if err := db.fill(ctx); err != nil {
		return nil, errors.Join(err, db.drop())
	}
	return db, nil
}

func (db *database) fill(ctx context.Context) (err error) {
	if db.url, err = withDatabase(db.serverURL, db.name); err != nil {
		return err
	}
	if db.Pool, err = pgxpool.New(ctx, db.url); err != nil {
		return err
	}
	if err := migrate.Up(ctx, db.Pool, migrate.Config{}); err != nil {
		return err
	}
	_, err = db.Exec(ctx, tables)
	return err
}

func (db *database) drop() error {
	if db.Pool != nil {
		db.Close()
	}
	return onServer(context.Background(), db.serverURL, "drop database "+db.name+" with (force)")
}

func onServer(ctx context.Context, serverURL, statement string) error {
	conn, err := pgx.Connect(ctx, serverURL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}

// withDatabase returns the URL with another database.
func withDatabase(serverURL, name string) (string, error) {
	u, err := url.Parse(serverURL)
	if err != nil || u.Scheme == "" {
		return "", errors.New("DATABASE_URL must be a URL such as postgres://user@host:5432/postgres")
	}
	u.Path = "/" + name
	query := u.Query()
	query.Set("pool_max_conns", "12") // by default a pool has four, and a consumer wants one for each of its workers
	u.RawQuery = query.Encode()
	return u.String(), nil
}
