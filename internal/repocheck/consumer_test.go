package repocheck

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// What a program pays that imports only outbox.
const (
	linkedMax    = 12 // modules in the program
	buildListMax = 44 // modules in its build list
)

// strangers are modules that such a program must not link.
var strangers = []string{"redis", "amqp", "nats", "kafka", "franz", "goose", "cron", "testcontainers"}

// consumer makes a module that uses this one and contains one program.
func consumer(t *testing.T, imports ...string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	repository, err := filepath.Abs(root)
	if err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for _, path := range imports {
		fmt.Fprintf(&text, "import _ %q\n", "github.com/commitbox/commitbox/"+path)
	}
	writeFile(t, dir, "main.go", "package main\n\n"+text.String()+"\nfunc main() {}\n")
	writeFile(t, dir, "go.sum", readFile(t, "go.sum"))
	writeFile(t, dir, "go.mod", fmt.Sprintf("module example.com/consumer\n\ngo 1.26.0\n\n"+
		"require github.com/commitbox/commitbox v0.0.0\n\nreplace github.com/commitbox/commitbox => %s\n", repository))
	if _, stderr, err := goCommand(t, dir, "mod", "tidy"); err != nil {
		t.Fatalf("go mod tidy: %v\n%s", err, stderr)
	}
	return dir
}

// linked returns the modules that the program of a consumer links, without its own.
func linked(t *testing.T, dir string) []string {
	t.Helper()
	stdout, stderr, err := goCommand(t, dir, "list", "-deps", "-f", "{{with .Module}}{{if not .Main}}{{.Path}}{{end}}{{end}}", ".")
	if err != nil {
		t.Fatalf("go list -deps: %v\n%s", err, stderr)
	}
	modules := lines(stdout)
	slices.Sort(modules)
	return slices.Compact(modules)
}

func strangersIn(modules []string) (found []string) {
	for _, module := range modules {
		if slices.ContainsFunc(strangers, func(s string) bool { return strings.Contains(module, s) }) {
			found = append(found, module)
		}
	}
	return found
}

func TestOutboxAloneIsSmall(t *testing.T) {
	t.Parallel()
	dir := consumer(t, "outbox")
	modules := linked(t, dir)
	if len(modules) > linkedMax {
		t.Errorf("a program with outbox links %d modules, the limit is %d: %v", len(modules), linkedMax, modules)
	}
	if found := strangersIn(modules); len(found) > 0 {
		t.Errorf("a program with outbox links %v", found)
	}
	stdout, stderr, err := goCommand(t, dir, "list", "-m", "all")
	if err != nil {
		t.Fatalf("go list -m all: %v\n%s", err, stderr)
	}
	if list := lines(stdout); len(list) > buildListMax {
		t.Errorf("its build list has %d modules, the limit is %d:\n%s", len(list), buildListMax, stdout)
	} else {
		t.Logf("links %d modules, build list %d", len(modules), len(list))
	}
}

// TestStrangersAreSeen shows that the check above can fail.
func TestStrangersAreSeen(t *testing.T) {
	t.Parallel()
	if found := strangersIn(linked(t, consumer(t, "outbox", "migrate"))); !slices.Contains(found, "github.com/pressly/goose/v3") {
		t.Errorf("goose was not seen in a program that links it: found %v", found)
	}
}

func TestNoContainersInTheRootModule(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"go.mod", "go.sum"} {
		if strings.Contains(readFile(t, name), "testcontainers") {
			t.Errorf("%s names testcontainers, which every user would have to download", name)
		}
	}
}
