package migrate

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/migrations"
)

const (
	lease      = 15 * time.Second
	renewEvery = 3 * time.Second
	retryEvery = 200 * time.Millisecond
)

// errLockLost ends a run whose lease has gone to another migrator.
var errLockLost = errors.New("the migrators' lock was lost; run again")

// bootstrap makes what the lock needs: the schema and the lock table, in one short transaction.
func (m *migrator) bootstrap(ctx context.Context) error {
	return pgx.BeginTxFunc(ctx, m.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		q := db.New(m.schema.On(tx))
		if err := q.BootstrapLock(ctx); err != nil {
			return err
		}
		exists, err := q.SchemaExists(ctx)
		if err != nil {
			return err
		}
		if !exists {
			if err := m.execFile(ctx, tx, "00_schema.sql"); err != nil {
				return err
			}
		}
		if exists, err = q.RelationExists(ctx, m.schema.Qualify("migration_lock")); err != nil || exists {
			return err
		}
		return m.execFile(ctx, tx, "01_lock.sql")
	})
}

func (m *migrator) execFile(ctx context.Context, tx pgx.Tx, name string) error {
	text, err := fs.ReadFile(m.schema.FS(migrations.Bootstrap), "bootstrap/"+name)
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, string(text))
	return err
}

// locked calls fn while this process holds the migrators' lock, and cancels fn's context when the lock is lost. It waits
// for the lock until ctx ends.
func (m *migrator) locked(ctx context.Context, fn func(context.Context) error) error {
	owner := pgtype.UUID{Bytes: uuid.New(), Valid: true}
	if err := m.acquire(ctx, owner); err != nil {
		return err
	}
	held, lost := context.WithCancelCause(ctx)
	renewed := make(chan struct{})
	go func() {
		defer close(renewed)
		m.renew(held, owner, lost)
	}()
	err := fn(held)
	if cause := context.Cause(held); err != nil && errors.Is(cause, errLockLost) {
		err = errors.Join(cause, err)
	}
	lost(nil)
	<-renewed
	release, cancel := context.WithTimeout(context.WithoutCancel(ctx), lease)
	defer cancel()
	// A lock that cannot be given back ends with its lease.
	return errors.Join(err, m.queries.MigrationUnlock(release, owner))
}

func (m *migrator) acquire(ctx context.Context, owner pgtype.UUID) error {
	for {
		n, err := m.queries.MigrationLock(ctx, db.MigrationLockParams{Owner: owner, LeaseSeconds: lease.Seconds()})
		if err != nil {
			return fmt.Errorf("take the migrators' lock: %w", err)
		}
		if n == 1 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for another migrator: %w", ctx.Err())
		case <-time.After(retryEvery/2 + rand.N(retryEvery)):
		}
	}
}

func (m *migrator) renew(ctx context.Context, owner pgtype.UUID, lost context.CancelCauseFunc) {
	for until := time.Now().Add(lease); ; {
		select {
		case <-ctx.Done():
			return
		case <-time.After(renewEvery):
		}
		sent := time.Now()
		n, err := m.queries.MigrationLockRenew(ctx, db.MigrationLockRenewParams{Owner: owner, LeaseSeconds: lease.Seconds()})
		if err == nil && n == 1 {
			until = sent.Add(lease)
		} else if ctx.Err() == nil && (err == nil || time.Now().After(until)) {
			lost(errLockLost)
			return
		}
	}
}
