package testenv

import (
	"context"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/devserver"
)

func closeAfter(t *testing.T, a *admin) {
	t.Helper()
	t.Cleanup(func() {
		if err := a.close(context.Background()); err != nil {
			t.Error(err)
		}
	})
}

func mustExist(t *testing.T, a *admin, name string, want bool) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	got, err := a.exists(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("database %s exists: %v, want %v", name, got, want)
	}
}

func TestSweepDropsDatabasesOfDeadOwnersOnly(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server := PrivatePostgres(t, devserver.PostgresOptions{})
	living, err := newAdmin(ctx, server.URL())
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, living)
	used, err := living.createFrom(ctx, "template0")
	if err != nil {
		t.Fatal(err)
	}
	dead, err := newAdmin(ctx, server.URL())
	if err != nil {
		t.Fatal(err)
	}
	left, err := dead.createFrom(ctx, "template0")
	if err != nil {
		t.Fatal(err)
	}
	if err := dead.conn.Close(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := living.conn.Exec(ctx, `CREATE DATABASE commitbox_test_drive`); err != nil {
		t.Fatal(err)
	}

	next, err := newAdmin(ctx, server.URL())
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, next)
	mustExist(t, next, left, false)
	mustExist(t, next, used, true)
	mustExist(t, next, "commitbox_test_drive", true)
}

func TestTemplateIsMadeOnceByManyProcesses(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server := PrivatePostgres(t, devserver.PostgresOptions{})
	var processes sync.WaitGroup
	for range 4 {
		a, err := newAdmin(ctx, server.URL())
		if err != nil {
			t.Fatal(err)
		}
		closeAfter(t, a)
		processes.Go(func() {
			for range 2 {
				if _, err := a.createMigrated(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	processes.Wait()

	a, err := newAdmin(ctx, server.URL())
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, a)
	var templates, copies int
	err = a.conn.QueryRow(ctx, `SELECT count(*) FILTER (WHERE datname LIKE 'commitbox_template%'),
		count(*) FILTER (WHERE datname LIKE 'commitbox_test%') FROM pg_database`).Scan(&templates, &copies)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := fmt.Sprint(templates, copies), "1 8"; got != want {
		t.Errorf("templates and copies: %s, want %s", got, want)
	}
}

// TestOwnerLockSurvivesTheTemplate shows that making the template leaves the
// lock that protects the process's databases.
func TestOwnerLockSurvivesTheTemplate(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server := PrivatePostgres(t, devserver.PostgresOptions{})
	a, err := newAdmin(ctx, server.URL())
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, a)
	name, err := a.createMigrated(ctx)
	if err != nil {
		t.Fatal(err)
	}
	next, err := newAdmin(ctx, server.URL())
	if err != nil {
		t.Fatal(err)
	}
	closeAfter(t, next)
	mustExist(t, next, name, true)
}

func TestLastProcessDropsTheTemplate(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	server := PrivatePostgres(t, devserver.PostgresOptions{})
	template, err := templateName()
	if err != nil {
		t.Fatal(err)
	}
	open := func() *admin {
		a, err := newAdmin(ctx, server.URL())
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	first, second := open(), open()
	name, err := first.createMigrated(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := first.drop(ctx, name); err != nil {
		t.Fatal(err)
	}
	if err := first.close(ctx); err != nil {
		t.Fatal(err)
	}
	mustExist(t, second, template, true)
	if err := second.close(ctx); err != nil {
		t.Fatal(err)
	}
	conn, err := pgx.Connect(ctx, server.URL())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(ctx)
	var left int
	if err := conn.QueryRow(ctx, `SELECT count(*) FROM pg_database WHERE starts_with(datname, 'commitbox_')`).Scan(&left); err != nil {
		t.Fatal(err)
	}
	if left != 0 {
		t.Errorf("%d databases are left when no process runs", left)
	}
}
