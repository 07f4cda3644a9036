// Package exampledb makes a database of its own for a run of an example.
package exampledb

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/migrate"
)

// DB is a database with the tables of commitbox and of the example.
type DB struct {
	*pgxpool.Pool
	Name, URL string
	serverURL string
}

// Create makes the database on a server, whose address must be a URL. What it makes is removed by Drop.
func Create(ctx context.Context, serverURL, tables string) (*DB, error) {
	u, err := url.Parse(serverURL)
	if err != nil || u.Scheme == "" {
		return nil, errors.New("DATABASE_URL must be a URL such as postgres://user@host:5432/postgres; the make targets set it")
	}
	db := &DB{Name: "commitbox_example_" + strings.ToLower(rand.Text()[:8]), serverURL: serverURL}
	u.Path = "/" + db.Name
	query := u.Query()
	query.Set("pool_max_conns", "12") // by default a pool has four
	u.RawQuery = query.Encode()
	db.URL = u.String()
	if err := db.onServer(ctx, "create database "+db.Name); err != nil {
		return nil, err
	}
	if err := db.fill(ctx, tables); err != nil {
		return nil, errors.Join(err, db.Drop())
	}
	return db, nil
}

func (db *DB) fill(ctx context.Context, tables string) (err error) {
	if db.Pool, err = pgxpool.New(ctx, db.URL); err != nil {
		return err
	}
	if err := migrate.Up(ctx, db.Pool, migrate.Config{}); err != nil {
		return err
	}
	_, err = db.Exec(ctx, tables)
	return err
}

// Drop closes the pool and removes the database, whoever is still connected.
func (db *DB) Drop() error {
	if db.Pool != nil {
		db.Close()
	}
	return db.onServer(context.Background(), "drop database "+db.Name+" with (force)")
}

func (db *DB) onServer(ctx context.Context, statement string) error {
	conn, err := pgx.Connect(ctx, db.serverURL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}
