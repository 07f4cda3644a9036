package repocheck

import (
	"io/fs"
	"os"
	"regexp"
	"strings"
	"testing"
)

var (
	testFunc    = regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	goBlock     = regexp.MustCompile("(?s)```go\n(.*?)```")
	makeCommand = regexp.MustCompile("`(?:[A-Z_]+=\\S+ )*make ([a-z-]+)`")
	makeTarget  = regexp.MustCompile(`(?m)^([a-z-]+):`)
)

// exampleLinesMax keeps the first example readable at a glance.
const exampleLinesMax = 30

func TestReadmeExampleIsTheCompiledOne(t *testing.T) {
	t.Parallel()
	blocks := goBlock.FindAllStringSubmatch(readFile(t, "README.md"), -1)
	if len(blocks) == 0 {
		t.Fatal("README.md shows no Go code")
	}
	compiled := readFile(t, "example_test.go")
	for _, block := range blocks {
		if !strings.Contains(compiled, block[1]) {
			t.Errorf("this code of README.md is not in example_test.go:\n%s", block[1])
		}
		if n := len(lines(block[1])); n > exampleLinesMax {
			t.Errorf("an example of README.md has %d lines, the limit is %d", n, exampleLinesMax)
		}
	}
}

func TestReadmeNamesRealTargets(t *testing.T) {
	t.Parallel()
	targets := map[string]bool{}
	for _, m := range makeTarget.FindAllStringSubmatch(readFile(t, "Makefile"), -1) {
		targets[m[1]] = true
	}
	commands := makeCommand.FindAllStringSubmatch(readFile(t, "README.md"), -1)
	if len(commands) == 0 {
		t.Fatal("README.md names no make target")
	}
	for _, command := range commands {
		if !targets[command[1]] {
			t.Errorf("README.md says %s, but the Makefile has no such target", command[0])
		}
	}
}

var requirementRow = regexp.MustCompile(`(?m)^\| ([AB]\d+) \|`)

// TestReadmeHasARowForEachCapability counts the table's rows: A1 to A10 and B1 to B10, one each, in order.
func TestReadmeHasARowForEachCapability(t *testing.T) {
	t.Parallel()
	want := strings.Fields("A1 A2 A3 A4 A5 A6 A7 A8 A9 A10 B1 B2 B3 B4 B5 B6 B7 B8 B9 B10")
	var got []string
	for _, m := range requirementRow.FindAllStringSubmatch(readFile(t, "README.md"), -1) {
		got = append(got, m[1])
	}
	if strings.Join(got, " ") != strings.Join(want, " ") {
		t.Errorf("rows are %v, want %v", got, want)
	}
}

// TestReadmeNamesEveryPackage looks for each package of the root module; an example is named by its folder.
func TestReadmeNamesEveryPackage(t *testing.T) {
	t.Parallel()
	stdout, stderr, err := goCommand(t, root, "list", "./...")
	if err != nil {
		t.Fatalf("%v\n%s", err, stderr)
	}
	readme := readFile(t, "README.md")
	for _, path := range lines(stdout) {
		name := strings.TrimPrefix(path, "github.com/commitbox/commitbox/")
		if example, ok := strings.CutPrefix(name, "examples/"); ok {
			name, _, _ = strings.Cut(example, "/")
		}
		if name != "internal" && !strings.Contains(readme, name+"`") && !strings.Contains(readme, name+"]") {
			t.Errorf("README.md does not name %s", path)
		}
	}
}

var testName = regexp.MustCompile("`(Test\\w+)`")

// TestReadmeNamesRealTests looks for every test that the README names.
func TestReadmeNamesRealTests(t *testing.T) {
	t.Parallel()
	known := testsOfTheRepository(t)
	for _, m := range testName.FindAllStringSubmatch(readFile(t, "README.md"), -1) {
		if !known[m[1]] {
			t.Errorf("README.md names %s, which does not exist", m[1])
		}
	}
}

func testsOfTheRepository(t *testing.T) map[string]bool {
	t.Helper()
	known := map[string]bool{}
	repository := os.DirFS(root)
	err := fs.WalkDir(repository, ".", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		content, err := fs.ReadFile(repository, path)
		for _, m := range testFunc.FindAllSubmatch(content, -1) {
			known[string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return known
}
