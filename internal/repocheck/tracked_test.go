package repocheck

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fileSizeMax keeps build results, dumps and archives out of the history, which never forgets them.
const fileSizeMax = 1 << 20

// unwanted says why a file must not be tracked; empty: it may.
func unwanted(path string, size int64) string {
	switch {
	case slices.Contains(strings.Split(path, "/"), ".build"):
		return "lies in a build folder"
	case size > fileSizeMax:
		return "is larger than 1 MiB"
	}
	return ""
}

func TestNoBuildResultsAreTracked(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "git", "-C", root, "ls-files", "-z").Output()
	if err != nil {
		t.Fatalf("list the tracked files: %v", err)
	}
	paths := strings.FieldsFunc(string(out), func(r rune) bool { return r == 0 })
	if len(paths) < 100 {
		t.Errorf("looked at %d files only", len(paths))
	}
	for _, path := range paths {
		info, err := os.Lstat(filepath.Join(root, path))
		if os.IsNotExist(err) {
			continue // removed, and not yet committed
		}
		if err != nil {
			t.Fatal(err)
		}
		if why := unwanted(path, info.Size()); why != "" {
			t.Errorf("%s %s", path, why)
		}
	}
}

// TestBuildResultsAreSeen shows that the check above can fail.
func TestBuildResultsAreSeen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		path string
		size int64
		bad  bool
	}{
		{"inbox/handle.go", fileSizeMax, false},
		{"inbox/a.build/x.go", 1, false},
		{".build/bin/x", 1, true},
		{"tools/.build/x", 1, true},
		{"dump", fileSizeMax + 1, true},
	} {
		if bad := unwanted(c.path, c.size) != ""; bad != c.bad {
			t.Errorf("%s with %d bytes: unwanted %v, want %v", c.path, c.size, bad, c.bad)
		}
	}
}
