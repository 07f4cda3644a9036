package testenv

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/migrate"
	"github.com/commitbox/commitbox/migrations"
)

// The advisory lock under which a test process looks for the template and makes
// it. Locks of two keys never meet the one-key locks of the databases' owners.
const (
	lockTemplate   = `SELECT pg_advisory_lock(1128419928, 1)`
	unlockTemplate = `SELECT pg_advisory_unlock(1128419928, 1)`
)

// The advisory lock that every test process shares as long as it may use the
// template. Who gets it alone is the last one.
const (
	joinUsers  = `SELECT pg_advisory_lock_shared(1128419928, 2)`
	leaveUsers = `SELECT pg_advisory_unlock_shared(1128419928, 2)`
	isLastUser = `SELECT pg_try_advisory_lock(1128419928, 2)`
)

// createMigrated makes a database with all migrations and returns its name. The
// first call on a server makes the template; later ones, from any test process,
// copy it.
func (a *admin) createMigrated(ctx context.Context) (string, error) {
	template, err := templateName()
	if err != nil {
		return "", err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if err := a.needTemplate(ctx, template); err != nil {
		return "", fmt.Errorf("testenv: make the template database: %w", err)
	}
	return a.create(ctx, template)
}

// needTemplate makes the template if the server does not have it. A template
// takes its name in the last step, so there is no half migrated one.
func (a *admin) needTemplate(ctx context.Context, name string) (err error) {
	if exists, err := a.exists(ctx, name); exists || err != nil {
		return err
	}
	if _, err := a.conn.Exec(ctx, lockTemplate); err != nil {
		return err
	}
	defer func() {
		_, unlocked := a.conn.Exec(ctx, unlockTemplate)
		err = errors.Join(err, unlocked)
	}()
	if exists, err := a.exists(ctx, name); exists || err != nil {
		return err
	}
	return a.makeTemplate(ctx, name)
}

func (a *admin) makeTemplate(ctx context.Context, name string) error {
	draft, err := a.create(ctx, "template0")
	if err != nil {
		return err
	}
	url, err := withDatabase(a.url, draft)
	if err != nil {
		return err
	}
	if err := migrateUp(ctx, url); err != nil {
		return errors.Join(err, a.dropNow(ctx, draft))
	}
	_, err = a.conn.Exec(ctx, fmt.Sprintf(`ALTER DATABASE %s RENAME TO %s`, draft, name))
	return err
}

// leaveTemplate drops the template if no other process may use it. The locks end
// with the connection. It requires a.mu.
func (a *admin) leaveTemplate(ctx context.Context) error {
	if _, err := a.conn.Exec(ctx, leaveUsers); err != nil {
		return err
	}
	var last bool
	if err := a.conn.QueryRow(ctx, isLastUser).Scan(&last); err != nil || !last {
		return err
	}
	name, err := templateName()
	if err != nil {
		return err
	}
	return a.dropNow(ctx, name)
}

func (a *admin) exists(ctx context.Context, name string) (found bool, err error) {
	err = a.conn.QueryRow(ctx, `SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)`, name).Scan(&found)
	return found, err
}

func migrateUp(ctx context.Context, url string) error {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	return migrate.Up(ctx, pool, migrate.Config{})
}

// templateName contains a hash of the migrations: another version of them gets
// another template.
func templateName() (string, error) {
	hash := sha256.New()
	err := fs.WalkDir(migrations.FS, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(migrations.FS, path)
		fmt.Fprintf(hash, "%s %d\n%s", path, len(content), content)
		return err
	})
	return "commitbox_template_" + hex.EncodeToString(hash.Sum(nil)[:8]), err
}
