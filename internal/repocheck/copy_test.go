package repocheck

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestA5_ThePaymentExampleCompilesElsewhere copies what the example says is to be copied into another module, where nothing
// internal can be imported. The path under which shop imports saga is all that changes.
func TestA5_ThePaymentExampleCompilesElsewhere(t *testing.T) {
	t.Parallel()
	dir := consumer(t)
	for _, part := range []string{"saga", "shop"} {
		if err := os.Mkdir(filepath.Join(dir, part), 0o700); err != nil {
			t.Fatal(err)
		}
		from := filepath.Join("examples/payment", part)
		files, err := os.ReadDir(filepath.Join(root, from))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if !strings.HasSuffix(f.Name(), "_test.go") {
				text := strings.ReplaceAll(readFile(t, filepath.Join(from, f.Name())), "github.com/commitbox/commitbox/examples/payment/", "example.com/consumer/")
				writeFile(t, filepath.Join(dir, part), f.Name(), text)
			}
		}
	}
	for _, args := range [][]string{{"mod", "tidy"}, {"vet", "./..."}} {
		if _, stderr, err := goCommand(t, dir, args...); err != nil {
			t.Errorf("go %v: %v\n%s", args, err, stderr)
		}
	}
}
