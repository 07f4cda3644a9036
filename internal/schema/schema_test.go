package schema_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/schema"
)

// refused are the names that have to be refused wherever a schema can be named. See also migrate and internal/flowtest.
var refused = []string{
	"my-schema", "MySchema", "1abc", "schéma", "a.b", "o'brien", `a"b`, "a$$b", "a$b", "a b", " a", "a ", "a\n", "a\x00", "Ü",
	"pg_x", "pg_", "pg_catalog", "public;", "a--", "ａ", strings.Repeat("a", 49), strings.Repeat("a", 70),
}

// accepted are names that are fine, those that PostgreSQL reads as key words included.
var accepted = []string{"user", "select", "order", "table", "_", "a", "a1", "pgx", "commitbox2", "my_commitbox", "x_commitbox_y", strings.Repeat("a", 48)}

func parse(t testing.TB, name string) schema.Name {
	t.Helper()
	n, err := schema.Parse(name)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestParse(t *testing.T) {
	t.Parallel()
	for _, name := range refused {
		if n, err := schema.Parse(name); !errors.Is(err, schema.ErrName) || n != (schema.Name{}) {
			t.Errorf("Parse(%q) = %v, %v; want ErrName", name, n, err)
		}
	}
	for _, name := range accepted {
		if n := parse(t, name); n.String() != name {
			t.Errorf("Parse(%q) = %q", name, n)
		}
	}
	for _, name := range []string{"", schema.Default} {
		if n := parse(t, name); n != (schema.Name{}) || n.String() != schema.Default {
			t.Errorf("Parse(%q) = %q, want the default", name, n)
		}
	}
}

func TestQualify(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{"": `"commitbox".inbox`, "user": `"user".inbox`} {
		if got := parse(t, name).Qualify("inbox"); got != want {
			t.Errorf("schema %q: %s, want %s", name, got, want)
		}
	}
}

func TestRewrite(t *testing.T) {
	t.Parallel()
	user := parse(t, "user")
	for sql, want := range map[string]string{
		"":                                "",
		"commitbox":                       `"user"`,
		"select 1":                        "select 1",
		"select 'x' from commitbox.inbox": `select 'x' from "user".inbox`,
		"commitbox.a,commitbox.b":         `"user".a,"user".b`,
		"'commitbox.inbox'::regclass":     `'"user".inbox'::regclass`,
		"$$ insert into commitbox.a $$":   `$$ insert into "user".a $$`,
		"commitbox2.a":                    "commitbox2.a",
		"_commitbox.a":                    "_commitbox.a",
		"commitbox_a":                     "commitbox_a",
		"$commitbox$ x $commitbox$":       "$commitbox$ x $commitbox$",
		"écommitbox.a":                    "écommitbox.a",
		"Commitbox.a":                     "Commitbox.a",
		"commitboxcommitbox.a":            "commitboxcommitbox.a",
	} {
		if got := user.Rewrite(sql); got != want {
			t.Errorf("Rewrite(%q) = %q, want %q", sql, got, want)
		}
		if got := parse(t, "").Rewrite(sql); got != sql {
			t.Errorf("default schema: Rewrite(%q) = %q", sql, got)
		}
	}
}

// A name that contains the default's must not be rewritten again.
func TestRewriteOfNamesThatContainTheDefault(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"commitbox2", "my_commitbox"} {
		if got, want := parse(t, name).Rewrite("commitbox.a"), `"`+name+`".a`; got != want {
			t.Errorf("schema %s: %s, want %s", name, got, want)
		}
	}
}

// The queries that the library runs keep their structure in every schema.
func TestRewriteKeepsTheStructureOfEveryQuery(t *testing.T) {
	t.Parallel()
	for _, q := range queries(t) {
		if !strings.Contains(q, schema.Default) {
			continue
		}
		for _, name := range accepted {
			checkStructure(t, q, parse(t, name))
		}
	}
}

// checkStructure compares the tokens of sql and of the text that it becomes: the schema's word is another one, in code
// as in literals and comments, and everything else is as before.
func checkStructure(t *testing.T, sql string, name schema.Name) {
	t.Helper()
	quotedName := pgx.Identifier{name.String()}.Sanitize()
	if name == (schema.Name{}) {
		quotedName = schema.Default
	}
	was, is := tokens(sql), tokens(name.Rewrite(sql))
	if len(was) != len(is) {
		t.Fatalf("%q has %d tokens, in schema %s %d: %q", sql, len(was), name, len(is), name.Rewrite(sql))
	}
	for i := range was {
		want := lexeme{was[i].kind, renameWords(was[i].text, quotedName)}
		if was[i] == (lexeme{"word", schema.Default}) && name != (schema.Name{}) {
			want.kind = "quoted"
		}
		if is[i] != want {
			t.Fatalf("in schema %s token %d of %q is %q, want %q", name, i, sql, is[i], want)
		}
	}
}

// renameWords replaces the whole words that are the default schema.
func renameWords(text, by string) string {
	var out strings.Builder
	for text != "" {
		n := span(text, wordByte)
		if word := text[:n]; word == schema.Default {
			out.WriteString(by)
		} else {
			out.WriteString(word)
		}
		text = text[n:]
		rest := span(text, func(b byte) bool { return !wordByte(b) })
		out.WriteString(text[:rest])
		text = text[rest:]
	}
	return out.String()
}

// acceptable is the rule for names, written apart from the one under test.
func acceptable(name string) bool {
	if name == "" {
		return true
	}
	for i := range len(name) {
		letter := name[i] == '_' || name[i] >= 'a' && name[i] <= 'z'
		digit := name[i] >= '0' && name[i] <= '9'
		if !letter && (i == 0 || !digit) {
			return false
		}
	}
	return len(name) <= 48 && !strings.HasPrefix(name, "pg_")
}

// bare says whether the schema's word stands as the statements write it: never in or beside double quotes, nor joined to
// the end of a dollar quote.
func bare(sql string) bool {
	list := append(append([]lexeme{{}}, tokens(sql)...), lexeme{})
	for i, x := range list {
		joined := x.text == schema.Default && (list[i-1].kind == "quoted" || list[i-1].kind == "dollar" || list[i+1].kind == "quoted")
		if joined || x.kind == "quoted" && strings.Contains(x.text, schema.Default) {
			return false
		}
	}
	return true
}

func FuzzRewrite(f *testing.F) {
	const mixed = "select 'commitbox.x'::regclass /* commitbox */ -- commitbox\n, $1, commitbox.f($$ commitbox.y $$)"
	for _, name := range append(append([]string{""}, accepted...), refused...) {
		f.Add(name, mixed)
	}
	for _, sql := range queries(f) {
		f.Add("user", sql)
	}
	f.Fuzz(func(t *testing.T, name, sql string) {
		n, err := schema.Parse(name)
		if (err == nil) != acceptable(name) {
			t.Fatalf("Parse(%q): %v", name, err)
		}
		if err != nil {
			if !errors.Is(err, schema.ErrName) || n != (schema.Name{}) {
				t.Fatalf("Parse(%q) = %q, %v", name, n, err)
			}
			return
		}
		if bare(sql) {
			checkStructure(t, sql, n)
		}
	})
}
