package migrate_test

import (
	"strings"
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// Names that need quoting, that are aliases or variables inside our functions, and the longest one.
var quotedNames = []string{"user", "select", "order", "at", "id", "i", "excluded", "commitbox2", strings.Repeat("a", 48)}

func TestB60_SchemaNamesThatNeedQuoting(t *testing.T) {
	t.Parallel()
	for _, name := range quotedNames {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db, cfg := testenv.EmptyDatabase(t), migrate.Config{Schema: name}
			exec(t, db, "create schema nothing; alter database "+db.Name+" set search_path = nothing")
			db.Pool.Reset()
			for range 2 {
				up(t, db, true, cfg)
			}
			checkOnlyIn(t, db, name)
			checkBodies(t, db, name)
			for range newest(t) + 1 {
				if err := migrate.Down(t.Context(), db.Pool, cfg); err != nil {
					t.Fatal(err)
				}
			}
			if n := applied(t, status(t, db, cfg)); n != 0 {
				t.Errorf("%d migrations are applied after Down to zero", n)
			}
			if n := applied(t, status(t, db, up(t, db, true, cfg))); n != int(newest(t)) {
				t.Errorf("%d migrations are applied after Up again", n)
			}
		})
	}
}

// checkOnlyIn checks that every object is in the chosen schema.
func checkOnlyIn(t *testing.T, db *testenv.DB, name string) {
	t.Helper()
	elsewhere := query[string](t, db, `select format('%s.%s', nspname, relname) from pg_class c join pg_namespace n on n.oid = relnamespace
		where nspname !~ '^pg_' and nspname not in ('information_schema', $1)`, name)
	if len(elsewhere) > 0 {
		t.Errorf("outside schema %s: %v", name, elsewhere)
	}
	if n := query[int64](t, db, "select count(*) from pg_class c join pg_namespace n on n.oid = relnamespace where nspname = $1", name); n[0] < 20 {
		t.Errorf("only %d relations in schema %s", n[0], name)
	}
}

// checkBodies checks that no function, default, constraint or generated column still names the default schema.
func checkBodies(t *testing.T, db *testenv.DB, name string) {
	t.Helper()
	stale := query[string](t, db, `select text from (
			select pg_get_functiondef(p.oid) from pg_proc p where p.pronamespace = (select oid from pg_namespace where nspname = $1)
			union all select pg_get_expr(d.adbin, d.adrelid) from pg_attrdef d
			union all select pg_get_constraintdef(c.oid) from pg_constraint c
		) x (text) where text ~ '\mcommitbox\M'`, name)
	for _, text := range stale {
		t.Errorf("schema %s: %s", name, text)
	}
}

// Two schemas of one database have their own history, data and locks.
func TestB60_TwoSchemasAreIndependent(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	up(t, db, true, migrate.Config{Schema: "order"})
	keys := query[int64](t, db, `select commitbox.inbox_lock('c', 'm') union all select "order".inbox_lock('c', 'm')`)
	if keys[0] == keys[1] {
		t.Error("one message has one advisory lock in two schemas")
	}
	exec(t, db, `select "order".enqueue('t', '')`)
	if n := query[int64](t, db, `select count(*) from commitbox.outbox_message union all select count(*) from "order".outbox_message`); n[0] != 0 || n[1] != 1 {
		t.Errorf("%d and %d messages, want 0 and 1", n[0], n[1])
	}
	if err := migrate.Down(t.Context(), db.Pool, migrate.Config{Schema: "order"}); err != nil {
		t.Fatal(err)
	}
	checkHistory(t, db)
}
