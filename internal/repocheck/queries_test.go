package repocheck

import (
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var queryHead = regexp.MustCompile(`^-- name: [A-Z]\w* :(one|many|exec|execrows)$`)

// uncommented returns the heads of queries that no comment follows.
func uncommented(text string) (heads []string) {
	rows := lines(text)
	for i, row := range rows {
		if !strings.HasPrefix(row, "-- name:") {
			continue
		}
		explained := i+1 < len(rows) && strings.HasPrefix(rows[i+1], "-- ") && len(rows[i+1]) > 40
		if !queryHead.MatchString(row) || !explained {
			heads = append(heads, row)
		}
	}
	return heads
}

func TestEveryQueryHasAComment(t *testing.T) {
	names, err := filepath.Glob(filepath.Join(root, "queries", "*.sql"))
	if err != nil || len(names) == 0 {
		t.Fatalf("no queries: %v", err)
	}
	for _, name := range names {
		text := readFile(t, filepath.Join("queries", filepath.Base(name)))
		if !strings.HasPrefix(text, "-- name: ") {
			t.Errorf("%s does not begin with a query", name)
		}
		for _, head := range uncommented(text) {
			t.Errorf("%s: %s has no comment", filepath.Base(name), head)
		}
	}
}

func TestTheCheckFindsAQueryWithoutAComment(t *testing.T) {
	const explained = "-- name: A :one\n-- Reads one row by its primary key; takes no lock.\nselect 1;\n"
	for text, want := range map[string]int{
		explained: 0,
		explained + "-- name: B :one\nselect 1;\n":                                       1,
		"-- name: A :one\n-- short\nselect 1;":                                           1,
		"-- name: a one\n-- Reads one row by its primary key; takes no lock.\nselect 1;": 1,
		"-- name: A :one": 1,
	} {
		if got := uncommented(text); len(got) != want {
			t.Errorf("%q: found %q", text, got)
		}
	}
}
