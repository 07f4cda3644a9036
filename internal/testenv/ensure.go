package testenv

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// ensure lets tools/devservices install the programs of a server.
func ensure(ctx context.Context, name string) error {
	tools, err := toolsDir()
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "go", "run", "./devservices", "ensure", name)
	cmd.Dir = tools
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("testenv: install %s: %w\n%s", name, err, out)
	}
	return nil
}

// toolsDir finds the tools module above the working directory, which is the
// folder of the package under test.
func toolsDir() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		tools := filepath.Join(dir, "tools")
		if info, err := os.Stat(filepath.Join(tools, "devservices")); err == nil && info.IsDir() {
			return tools, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("testenv: no tools/devservices above the working directory, so nothing can be installed")
		}
		dir = parent
	}
}
