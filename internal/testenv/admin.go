package testenv

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
)

const testPrefix = "commitbox_test_"

// admin makes and drops databases on one connection that lives as long as the
// test process. The connection holds an advisory lock whose key is part of the
// names of its databases, so another process can tell whether their owner is
// alive, wherever it runs.
type admin struct {
	url string
	key int64

	mu   sync.Mutex // guards conn and made
	conn *pgx.Conn
	made int
}

var adminOnce struct {
	sync.Mutex
	admin *admin
}

// openAdmin returns the process's admin; its first call also drops the
// databases of dead test processes.
func openAdmin(ctx context.Context) (*admin, error) {
	adminOnce.Lock()
	defer adminOnce.Unlock()
	if adminOnce.admin != nil {
		return adminOnce.admin, nil
	}
	url, err := sharedPostgres.address()
	if err != nil {
		return nil, err
	}
	a, err := newAdmin(ctx, url)
	if err != nil {
		return nil, err
	}
	adminOnce.admin = a
	return a, nil
}

func closeAdmin() error {
	adminOnce.Lock()
	defer adminOnce.Unlock()
	if adminOnce.admin == nil {
		return nil
	}
	a := adminOnce.admin
	adminOnce.admin = nil
	return a.close(context.Background())
}

func newAdmin(ctx context.Context, url string) (*admin, error) {
	key, err := strconv.ParseUint(randomHex(8), 16, 64)
	if err != nil {
		return nil, err
	}
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("testenv: connect to the test server: %w", err)
	}
	a := &admin{url: url, key: int64(key), conn: conn}
	if _, err := conn.Exec(ctx, `SELECT pg_advisory_lock($1)`, a.key); err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	if _, err := conn.Exec(ctx, joinUsers); err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	if err := a.sweep(ctx); err != nil {
		return nil, errors.Join(err, conn.Close(ctx))
	}
	return a, nil
}

// close ends the connection; the last of all test processes drops the template.
func (a *admin) close(ctx context.Context) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return errors.Join(a.leaveTemplate(ctx), a.conn.Close(ctx))
}

// createFrom makes a database from a template and returns its name.
func (a *admin) createFrom(ctx context.Context, template string) (string, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.create(ctx, template)
}

// create requires a.mu.
func (a *admin) create(ctx context.Context, template string) (string, error) {
	a.made++
	name := fmt.Sprintf("%s%016x_%d", testPrefix, uint64(a.key), a.made)
	_, err := a.conn.Exec(ctx, fmt.Sprintf(`CREATE DATABASE %s TEMPLATE %s`, name, template))
	if err != nil {
		return "", fmt.Errorf("testenv: create a test database: %w", err)
	}
	return name, nil
}

func (a *admin) drop(ctx context.Context, name string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.dropNow(ctx, name)
}

// dropNow requires a.mu or an admin that nobody else knows.
func (a *admin) dropNow(ctx context.Context, name string) error {
	if _, err := a.conn.Exec(ctx, fmt.Sprintf(`DROP DATABASE IF EXISTS %s WITH (FORCE)`, name)); err != nil {
		return fmt.Errorf("testenv: drop test database %s: %w", name, err)
	}
	return nil
}

// sweep drops the databases whose owner's advisory lock is free.
func (a *admin) sweep(ctx context.Context) error {
	rows, err := a.conn.Query(ctx, `SELECT datname FROM pg_database WHERE starts_with(datname, $1)`, testPrefix)
	if err != nil {
		return fmt.Errorf("testenv: list test databases: %w", err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("testenv: list test databases: %w", err)
	}
	for _, name := range names {
		if err := a.sweepOne(ctx, name); err != nil {
			return err
		}
	}
	return nil
}

func (a *admin) sweepOne(ctx context.Context, name string) error {
	owner, _, _ := strings.Cut(strings.TrimPrefix(name, testPrefix), "_")
	bits, err := strconv.ParseUint(owner, 16, 64)
	if err != nil {
		return nil // not a name that this package makes
	}
	key := int64(bits)
	var dead bool
	if err := a.conn.QueryRow(ctx, `SELECT pg_try_advisory_lock($1)`, key).Scan(&dead); err != nil || !dead {
		return err
	}
	err = a.dropNow(ctx, name)
	_, unlocked := a.conn.Exec(ctx, `SELECT pg_advisory_unlock($1)`, key)
	return errors.Join(err, unlocked)
}
