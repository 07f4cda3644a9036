package inbox_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Leases, backoff and retention go by PostgreSQL's clock, so that a process whose clock is a day off does no harm: no
// statement of the inbox is given a time, but for what PostgreSQL itself had answered before.
func TestNoStatementIsGivenTheTimeOfTheProcess(t *testing.T) {
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
