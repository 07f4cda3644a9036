package repocheck

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// sqlMayStandIn are the folders whose Go files may hold SQL: generated code, programs to read, and what only tests use.
var sqlMayStandIn = []string{"internal/db/", "internal/testenv/", "internal/devserver/", "examples/", "bench/", ".build/"}

// controlMayStandIn holds the words that control a transaction.
const controlMayStandIn = "internal/schema/txcontrol.go"

var (
	// A statement, wherever it stands in a string.
	statement = regexp.MustCompile(`(?is)\bselect\b.+\bfrom\s+[\w(]|\binsert\s+into\s+\S+|\bupdate\s+\S+\s+set\s+\S+\s*=|\bdelete\s+from\s+\S+|` +
		// One that a string begins with.
		`^\s*(--.*\n\s*)*(select\s|with\s+(recursive\s+)?\w+\s+as\s|merge\s+into\s|truncate\s+\w+$|copy\s+\S+\s+(from|to)\s|` +
		`(create|alter|drop)\s+(unlogged\s+|or\s+replace\s+|unique\s+|temp\s+)*(table|schema|index|function|database|role|user|view|type|sequence|trigger|extension)\s|` +
		`set\s+(local|session|transaction)\s|set\s+\w+\s*(=|to)\s|listen\s+\w+$|notify\s+\w+|lock\s+table\s|(grant|revoke)\s.+\son\s|` +
		`(vacuum|analyze|explain)\s+\w+$)`)
	control = regexp.MustCompile(`(?i)^\s*((begin|start\s+transaction|commit|rollback|abort)(\s+(work|transaction|isolation\s.*|to\s.*|prepared\s.*))?|` +
		`savepoint\s+\w+|release\s+(savepoint\s+)?\w+|prepare\s+transaction\s.*)\s*;?\s*$`)
)

// sqlIn returns the string literals of a Go file that hold SQL. One that is compared with something, such as the tag
// with which PostgreSQL answers a COMMIT, is not a statement.
func sqlIn(t *testing.T, name string, source any) (statements, controls []string) {
	t.Helper()
	files := token.NewFileSet()
	file, err := parser.ParseFile(files, name, source, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	compared := map[ast.Node]bool{}
	ast.Inspect(file, func(n ast.Node) bool {
		if e, ok := n.(*ast.BinaryExpr); ok && (e.Op == token.EQL || e.Op == token.NEQ) {
			compared[e.X], compared[e.Y] = true, true
		}
		literal, ok := n.(*ast.BasicLit)
		if !ok || literal.Kind != token.STRING || compared[literal] {
			return true
		}
		text, err := strconv.Unquote(literal.Value)
		if err != nil {
			t.Fatal(err)
		}
		where := files.Position(literal.Pos()).String() + ": " + literal.Value
		switch {
		case control.MatchString(text):
			controls = append(controls, where)
		case statement.MatchString(text):
			statements = append(statements, where)
		}
		return true
	})
	return statements, controls
}

func TestNoSQLInGoStrings(t *testing.T) {
	t.Parallel()
	checked := 0
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		allowed := slices.ContainsFunc(sqlMayStandIn, func(folder string) bool { return strings.HasPrefix(path+"/", folder) })
		if entry.IsDir() {
			if allowed || path == ".git" {
				return fs.SkipDir
			}
			return nil
		}
		if allowed || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return nil
		}
		checked++
		statements, controls := sqlIn(t, filepath.Join(root, path), nil)
		for _, found := range statements {
			t.Errorf("SQL belongs in queries/: %s", found)
		}
		for _, found := range controls {
			if path != controlMayStandIn {
				t.Errorf("transaction control belongs in %s: %s", controlMayStandIn, found)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if checked < 20 {
		t.Errorf("looked at %d files only", checked)
	}
}

// TestSQLIsRecognised shows that the check above can fail, and that it leaves sentences alone.
func TestSQLIsRecognised(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"select 1":                                "statement",
		"SELECT id FROM t":                        "statement",
		"  -- why\n select clock_timestamp()":     "statement",
		"with x as (values (1)) table x":          "statement",
		"insert into t values (1)":                "statement",
		"update t set a = 1":                      "statement",
		"delete from t where id = $1":             "statement",
		"create table t (id int)":                 "statement",
		"drop schema s cascade":                   "statement",
		"set local lock_timeout = '1s'":           "statement",
		"listen channel":                          "statement",
		"begin isolation level read committed":    "control",
		"COMMIT":                                  "control",
		"rollback to savepoint a":                 "control",
		"savepoint a":                             "control",
		"release savepoint a":                     "control",
		"commit: %w":                              "",
		"rollback failed, the message is retried": "",
		"select the shard to claim":               "statement", // a sentence that begins like a statement is reworded
		"the row was deleted from under us":       "",
		"update the message":                      "",
		"with the table's lock held":              "",
		"insert a row":                            "",
		"could not set the deadline":              "",
	} {
		statements, controls := sqlIn(t, "x.go", "package x\n\nvar _ = "+strconv.Quote(text))
		got := ""
		if len(statements) > 0 {
			got = "statement"
		} else if len(controls) > 0 {
			got = "control"
		}
		if got != want {
			t.Errorf("%q is taken for %q, want %q", text, got, want)
		}
	}
}
