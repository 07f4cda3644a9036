package inbox_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/db"
)

// Leases, backoff and retention go by PostgreSQL's clock, so that a process whose clock is a day off does no harm: no
// statement of the inbox is given a time, but for what PostgreSQL itself had answered before.
func TestB69_NoStatementIsGivenTheTimeOfTheProcess(t *testing.T) {
	files, err := filepath.Glob("../internal/db/inbox*.go")
	if err != nil || len(files) < 5 {
		t.Fatalf("the generated statements are not found: %v, %v", files, err)
	}
	var given []string
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			given = append(given, times(decl)...)
		}
	}
	slices.Sort(given)
	want := []string{ // cursors of lists, and the row's own received_at
		"InboxHeldParams.ReceivedAt", "InboxListParams.AfterAt", "InboxRunnableParams.AfterAt",
	}
	if diff := cmp.Diff(want, given); diff != "" {
		t.Errorf("times given to statements (-want +got):\n%s", diff)
	}
}

// times returns the parameters of a declaration, of a statement's function or of its parameter type, that are times.
func times(decl ast.Decl) (names []string) {
	var owner string
	var fields []*ast.Field
	switch d := decl.(type) {
	case *ast.FuncDecl:
		owner, fields = d.Name.Name, d.Type.Params.List
	case *ast.GenDecl:
		spec, ok := d.Specs[0].(*ast.TypeSpec)
		if !ok {
			return nil
		}
		if record, ok := spec.Type.(*ast.StructType); ok && strings.HasSuffix(spec.Name.Name, "Params") {
			owner, fields = spec.Name.Name, record.Fields.List
		}
	}
	for _, field := range fields {
		if isTime(field.Type) {
			for _, name := range field.Names {
				names = append(names, owner+"."+name.Name)
			}
		}
	}
	return names
}

func isTime(expr ast.Expr) bool {
	if star, ok := expr.(*ast.StarExpr); ok {
		expr = star.X
	}
	selector, ok := expr.(*ast.SelectorExpr)
	return ok && (selector.Sel.Name == "Time" || selector.Sel.Name == "Timestamptz")
}

// A range over an index is compared with the time of the statement: clock_timestamp() changes from row to row and can be no
// condition of an index. Rows that are found by their key are compared with the clock itself.
func TestF20_RangesAreComparedWithTheStatementsTime(t *testing.T) {
	w := newWorld(t)
	ranges := 0
	for _, statement := range strings.Split(db.InboxList+db.InboxStats+db.InboxRunnable+functionsOf(t, "inbox_list", "inbox_stats"), "\n") {
		if strings.Contains(statement, "statement_timestamp()") {
			ranges++
		}
		if strings.Contains(statement, "clock_timestamp()") {
			t.Errorf("a range by the clock: %s", statement)
		}
	}
	if ranges < 5 {
		t.Errorf("%d lines with ranges were found", ranges)
	}
	w.exec(`insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, next_attempt_at, received_at)
		select 'c', g::text, 'failed', 1, 1, now(), now() - g * interval '1 s' from generate_series(1, 20000) g; analyze commitbox.inbox`)
	rows, err := w.Pool.Query(t.Context(), `explain (costs off) select message_id from commitbox.inbox i
		where i.consumer = 'c' and i.finished_at is null and i.received_at <= statement_timestamp() - interval '5 h' order by i.received_at, i.message_id limit 100`)
	if err != nil {
		t.Fatal(err)
	}
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || !strings.Contains(strings.Join(plan, "\n"), "Index Cond: ((consumer = 'c'::text) AND (received_at <=") {
		t.Errorf("%v\n%s", err, strings.Join(plan, "\n"))
	}
}

// functionsOf returns the definitions of SQL functions as they stand in the migrations.
func functionsOf(t *testing.T, names ...string) (text string) {
	t.Helper()
	files, err := filepath.Glob("../migrations/*.sql")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		content, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if _, body, found := strings.Cut(string(content), "create function commitbox."+name+"("); found {
				body, _, _ = strings.Cut(body, "-- +goose StatementEnd")
				text += body
			}
		}
	}
	return text
}
