package migrations_test

import (
	"io/fs"
	osexec "os/exec"
	"regexp"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrations"
)

// halves returns the two halves of a migration.
func halves(t *testing.T, name string) (up, down string) {
	t.Helper()
	text, err := fs.ReadFile(migrations.FS, name)
	if err != nil {
		t.Fatal(err)
	}
	up, down, found := strings.Cut(string(text), "-- +goose Down\n")
	if !found || !strings.HasPrefix(up, "-- +goose Up\n") {
		t.Fatalf("%s does not have an Up and then a Down", name)
	}
	return up, down
}

func files(t *testing.T) []string {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*")
	if err != nil || len(names) == 0 {
		t.Fatalf("no migrations: %v", err)
	}
	return names
}

func TestFilesAreNumberedAndGoBothWays(t *testing.T) {
	t.Parallel()
	form := regexp.MustCompile(`^\d{5}_[a-z]+(_[a-z]+)*\.sql$`)
	before := ""
	for _, name := range files(t) {
		if !form.MatchString(name) || name[:6] == before {
			t.Errorf("a file is named %s", name)
		}
		before = name[:6]
		up, down := halves(t, name)
		if len(statements(up)) == 0 || len(statements(down)) == 0 {
			t.Errorf("%s has an empty half", name)
		}
	}
}

func TestB57_MigrationsOnlyMakeNewObjects(t *testing.T) {
	t.Parallel()
	for _, name := range files(t) {
		up, _ := halves(t, name)
		for _, problem := range longLocks(up) {
			t.Errorf("%s: %s", name, problem)
		}
	}
}

// The check itself finds what it is for.
func TestB57_TheCheckFindsLongLocks(t *testing.T) {
	t.Parallel()
	for sql, allowed := range map[string]bool{
		"create table commitbox.a (b int generated always as (1) stored);":                        true,
		"create table commitbox.a (); create index on commitbox.a (b);":                           true,
		"create unique index a_b on commitbox.a (b);":                                             false,
		"create table commitbox.c (); create index on commitbox.a (b);":                           false,
		"create index concurrently a_b on commitbox.a (b);":                                       false,
		"-- +goose NO TRANSACTION\ncreate index concurrently if not exists i on commitbox.a (b);": true,
		"alter table commitbox.a add column b int;":                                               true,
		"alter table commitbox.a add column b int not null default 0;":                            true,
		"alter table commitbox.a add column b uuid default gen_random_uuid();":                    false,
		"alter table commitbox.a add column b int generated always as (1) stored;":                false,
		"alter table commitbox.a add column b bigint generated always as identity;":               false,
		"alter table commitbox.a add column b int references commitbox.c;":                        false,
		"alter table commitbox.a add constraint x check (b > 0);":                                 false,
		"alter table commitbox.a add constraint x check (b > 0) not valid;":                       true,
		"alter table commitbox.a alter column b type bigint;":                                     false,
		"alter table commitbox.a alter column b set not null;":                                    false,
		"alter table commitbox.a drop column b;":                                                  false,
		"alter table commitbox.a rename column b to c;":                                           false,
		"create table commitbox.a (); alter table commitbox.a alter column b type bigint;":        true,
		"drop table commitbox.a;":                                                                 false,
		"drop index commitbox.a_b;":                                                               false,
		"update commitbox.a set b = 1;":                                                           false,
		"vacuum full commitbox.a;":                                                                false,
		"create function commitbox.f() returns int language sql as $$ update x set a = 1; $$;":    true,
		"create trigger x before insert on commitbox.a execute function commitbox.f();":           false,
		"-- vacuum full commitbox.a;\ncreate sequence commitbox.s;":                               true,
	} {
		if problems := longLocks(sql); (len(problems) == 0) != allowed {
			t.Errorf("%s\nproblems: %q", sql, problems)
		}
	}
}

// Programs that run the files with another tool do not link goose, or anything else.
func TestThePackageImportsOnlyTheStandardLibrary(t *testing.T) {
	t.Parallel()
	const self = "github.com/commitbox/commitbox/migrations"
	answer, err := osexec.CommandContext(t.Context(), "go", "list", "-deps", self).Output()
	if err != nil {
		t.Fatal(err)
	}
	out := string(answer)
	for _, path := range strings.Fields(out) {
		if first, _, _ := strings.Cut(path, "/"); strings.Contains(first, ".") && path != self {
			t.Errorf("imports %s", path)
		}
	}
	if !strings.Contains(out, self) {
		t.Errorf("go list answered:\n%s", out)
	}
}

// What an operator's function answers is said where the operator looks: \df+ in psql.
func TestOperatorFunctionsSayWhatTheyAnswer(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	silent := one[[]string](t, db, `select coalesce(array_agg(p.proname::text order by p.proname), '{}') from pg_proc p
		where p.pronamespace = 'commitbox'::regnamespace and 'reason' = any (p.proargnames) and p.prorettype <> 'void'::regtype
		  and p.proname <> 'outbox_reblock' and obj_description(p.oid, 'pg_proc') is null`)
	if len(silent) > 0 {
		t.Errorf("no comment says what the answers of %v mean", silent)
	}
}
