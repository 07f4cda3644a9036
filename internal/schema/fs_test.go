package schema_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/commitbox/commitbox/internal/schema"
	"github.com/commitbox/commitbox/migrations"
)

func TestFSRewritesOnlySQL(t *testing.T) {
	t.Parallel()
	files := fstest.MapFS{
		"1.sql":     {Data: []byte("drop table commitbox.a;")},
		"sub/2.sql": {Data: []byte("drop table commitbox.b;")},
		"notes.txt": {Data: []byte("commitbox")},
	}
	view := parse(t, "order").FS(files)
	for name, want := range map[string]string{
		"1.sql": `drop table "order".a;`, "sub/2.sql": `drop table "order".b;`, "notes.txt": "commitbox",
	} {
		got, err := fs.ReadFile(view, name)
		if err != nil || string(got) != want {
			t.Errorf("%s: %q, %v; want %q", name, got, err, want)
		}
		info, err := fs.Stat(view, name)
		if err != nil || info.Size() != int64(len(want)) {
			t.Errorf("%s: size %v, %v; want %d", name, info, err, len(want))
		}
	}
	if _, err := fs.ReadFile(view, "absent.sql"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an absent file: %v", err)
	}
	if names, err := fs.Glob(view, "*.sql"); err != nil || len(names) != 1 {
		t.Errorf("*.sql: %v, %v", names, err)
	}
	if got, err := fs.ReadFile(parse(t, schema.Default).FS(files), "1.sql"); err != nil || string(got) != "drop table commitbox.a;" {
		t.Errorf("default schema: %q, %v", got, err)
	}
}

// Every migration keeps its structure in every schema, and none mentions the default schema any more.
func TestFSOfTheMigrations(t *testing.T) {
	t.Parallel()
	err := fs.WalkDir(migrations.FS, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		text, err := fs.ReadFile(migrations.FS, path)
		if err != nil {
			return err
		}
		for _, name := range accepted {
			checkStructure(t, string(text), parse(t, name))
		}
		moved, err := fs.ReadFile(parse(t, "user").FS(migrations.FS), path)
		if strings.Contains(string(moved), schema.Default) {
			t.Errorf("%s still names %s in another schema", path, schema.Default)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}
