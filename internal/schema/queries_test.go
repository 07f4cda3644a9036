package schema_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"strconv"
	"testing"
)

// queries returns the text of every query of internal/db.
func queries(t testing.TB) (list []string) {
	t.Helper()
	names, err := filepath.Glob("../db/*.sql.go")
	if err != nil || len(names) == 0 {
		t.Fatalf("no generated queries: %v", err)
	}
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			if group, ok := decl.(*ast.GenDecl); ok && group.Tok == token.CONST {
				list = append(list, constants(t, group)...)
			}
		}
	}
	return list
}

func constants(t testing.TB, group *ast.GenDecl) (list []string) {
	t.Helper()
	for _, spec := range group.Specs {
		for _, value := range spec.(*ast.ValueSpec).Values {
			text, err := strconv.Unquote(value.(*ast.BasicLit).Value)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, text)
		}
	}
	return list
}
