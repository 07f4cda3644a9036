package migrate_test

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/schema"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

func status(t *testing.T, db *testenv.DB, cfg migrate.Config) []migrate.Migration {
	t.Helper()
	list, err := migrate.Status(t.Context(), newPool(t, db.URL), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return list
}

func TestNilPoolIsRefused(t *testing.T) {
	t.Parallel()
	_, statusErr := migrate.Status(t.Context(), nil, migrate.Config{})
	for name, err := range map[string]error{
		"Up":     migrate.Up(t.Context(), nil, migrate.Config{}),
		"Down":   migrate.Down(t.Context(), nil, migrate.Config{}),
		"Status": statusErr,
	} {
		var input *commitbox.InputError
		if !errors.As(err, &input) || input.Field != "pool" {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// applied counts the applied migrations and checks that they come first.
func applied(t *testing.T, list []migrate.Migration) (n int) {
	t.Helper()
	for i, m := range list {
		if m.Version != versions(t)[i+1] || m.Name == "" {
			t.Errorf("entry %d is version %d, %q", i, m.Version, m.Name)
		}
		if !m.AppliedAt.IsZero() {
			n++
		}
		if m.AppliedAt.IsZero() == (n > i) {
			t.Errorf("version %d is out of order", m.Version)
		}
	}
	return n
}

func TestStatusFollowsUpAndDown(t *testing.T) {
	t.Parallel()
	db, cfg := testenv.EmptyDatabase(t), migrate.Config{}
	all := int(newest(t))
	if list := status(t, db, cfg); len(list) != all || applied(t, list) != 0 {
		t.Errorf("before: %v", list)
	}
	if schemas := query[int64](t, db, "select count(*) from pg_namespace where nspname = 'commitbox'"); schemas[0] != 0 {
		t.Error("Status has made the schema")
	}
	for want := all; want >= 0; want-- {
		if list := status(t, db, up(t, db, want == all, cfg)); applied(t, list) != want {
			t.Errorf("%d migrations are applied, want %d", applied(t, list), want)
		}
		if err := migrate.Down(t.Context(), db.Pool, cfg); err != nil {
			t.Fatalf("down from %d: %v", want, err)
		}
	}
	left := query[string](t, db, `select relname::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
		where n.nspname = 'commitbox' and relkind <> 'i' order by 1`)
	if diff := cmp.Diff([]string{"goose_version", "goose_version_id_seq", "migration_lock"}, left); diff != "" {
		t.Errorf("left after Down to zero (-want +got):\n%s", diff)
	}
	functions := query[int64](t, db, "select count(*) from pg_proc p join pg_namespace n on n.oid = p.pronamespace where nspname = 'commitbox'")
	if functions[0] != 0 {
		t.Errorf("%d functions are left after Down to zero", functions[0])
	}
	if applied(t, status(t, db, up(t, db, true, cfg))) != all {
		t.Error("Up after Down to zero did not apply everything")
	}
}

// up calls Up if it is wanted, and returns cfg.
func up(t *testing.T, db *testenv.DB, wanted bool, cfg migrate.Config) migrate.Config {
	t.Helper()
	if wanted {
		if err := migrate.Up(t.Context(), db.Pool, cfg); err != nil {
			t.Fatal(err)
		}
	}
	return cfg
}

// The role that watches the service may look at the history.
func TestStatusForARoleThatCanOnlyRead(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	role := strings.Replace(db.Name, "test", "reader", 1)
	exec(t, db, "create role "+role+" login")
	t.Cleanup(func() { dropRole(t, db, role) })
	exec(t, db, "grant usage on schema commitbox to "+role)
	exec(t, db, "grant select on all tables in schema commitbox to "+role)
	pool := newPool(t, db.URL+"&options=-crole%3D"+role)
	list, err := migrate.Status(t.Context(), pool, migrate.Config{})
	if err != nil || applied(t, list) != int(newest(t)) {
		t.Errorf("status: %v, %v", list, err)
	}
	if err := migrate.Up(t.Context(), pool, migrate.Config{}); err == nil || !strings.Contains(err.Error(), "permission denied") {
		t.Errorf("Up by a role that can only read: %v", err)
	}
}

func TestRefusedNames(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	for _, name := range []string{"my-schema", "MySchema", "a.b", "o'brien", `a"b`, "a$$b", "pg_x", strings.Repeat("a", 70)} {
		cfg := migrate.Config{Schema: name}
		_, statusErr := migrate.Status(t.Context(), db.Pool, cfg)
		for what, err := range map[string]error{
			"Up": migrate.Up(t.Context(), db.Pool, cfg), "Down": migrate.Down(t.Context(), db.Pool, cfg), "Status": statusErr,
		} {
			if !errors.Is(err, schema.ErrName) {
				t.Errorf("%s in schema %q: %v", what, name, err)
			}
		}
	}
	const ours = "select count(*) from pg_namespace where nspname !~ '^pg_' and nspname not in ('public', 'information_schema')"
	if n := query[int64](t, db, ours); n[0] != 0 {
		t.Errorf("%d schemas were made", n[0])
	}
}

func TestLoggerGetsEveryMigration(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	var out bytes.Buffer
	cfg := migrate.Config{Logger: slog.New(slog.NewTextHandler(&out, nil))}
	up(t, db, true, cfg)
	for _, m := range status(t, db, cfg) {
		if strings.Count(out.String(), "migration="+m.Name+" direction=up") != 1 {
			t.Errorf("%s is not logged once:\n%s", m.Name, out.String())
		}
	}
	if n := strings.Count(out.String(), "\n"); n != int(newest(t)) {
		t.Errorf("%d lines for %d migrations:\n%s", n, newest(t), out.String())
	}
	up(t, db, true, cfg)
	if n := strings.Count(out.String(), "\n"); n != int(newest(t)) {
		t.Error("a call with nothing to do is logged")
	}
	if err := migrate.Down(t.Context(), db.Pool, cfg); err != nil || strings.Count(out.String(), "direction=down") != 1 {
		t.Errorf("Down: %v\n%s", err, out.String())
	}
}

// The pool is the caller's: it is neither closed nor used up, even if it has one connection and that one is busy.
func TestUpLeavesThePoolAlone(t *testing.T) {
	t.Parallel()
	db := testenv.EmptyDatabase(t)
	pool := newPool(t, db.URL)
	conn, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if err := migrate.Up(t.Context(), pool, migrate.Config{}); err != nil {
		t.Fatal(err)
	}
	if err := conn.Ping(t.Context()); err != nil {
		t.Errorf("the caller's connection: %v", err)
	}
}
