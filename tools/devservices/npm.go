package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
)

// The builds of PostgreSQL that are published as npm packages; for tests only.
var npmVersions = map[int]string{
	14: "14.23.0-beta.17",
	15: "15.18.0-beta.17",
	16: "16.14.0-beta.17",
	17: "17.10.0-beta.17",
	18: "18.4.0-beta.17",
}

// unpackedPostgres is the folder of an unpacked version.
func unpackedPostgres(w want) string {
	return filepath.Join(w.root, ".build", "postgres-"+strconv.Itoa(w.postgres))
}

// unpackPostgres fetches a version of PostgreSQL and unpacks it into .build.
func unpackPostgres(ctx context.Context, w want) error {
	if _, err := exec.LookPath("npm"); err != nil {
		return fmt.Errorf("PostgreSQL %d is not on this machine, and without npm its package cannot be fetched: %w", w.postgres, err)
	}
	draft, err := buildDir(w.root, fmt.Sprintf("postgres-%d.%d", w.postgres, os.Getpid()))
	if err != nil {
		return err
	}
	defer os.RemoveAll(draft)
	if err := os.Mkdir(draft, 0o755); err != nil {
		return err
	}
	cache := filepath.Join(w.root, ".build", "npm")
	archive, err := output(ctx, draft, "npm", "pack", "--silent", "--cache", cache, npmPackage(w.postgres))
	if err != nil {
		return err
	}
	if _, err := output(ctx, draft, "tar", "-xzf", strings.TrimSpace(archive)); err != nil {
		return err
	}
	unpacked := filepath.Join(draft, "package")
	// The package format has no symbolic links; its script makes them.
	if _, err := output(ctx, unpacked, "node", "scripts/hydrate-symlinks.js"); err != nil {
		return err
	}
	if err := os.Rename(unpacked, unpackedPostgres(w)); err != nil && !errors.Is(err, os.ErrExist) {
		return err // that it exists means that another call was faster
	}
	return nil
}

func npmPackage(version int) string {
	arch := map[string]string{"amd64": "x64", "arm64": "arm64"}[runtime.GOARCH]
	return fmt.Sprintf("@embedded-postgres/%s-%s@%s", runtime.GOOS, arch, npmVersions[version])
}

// output runs a program in a folder and returns what it prints.
func output(ctx context.Context, dir, name string, args ...string) (string, error) {
	var failure strings.Builder
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	cmd.Stderr = &failure
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, failure.String())
	}
	return string(out), nil
}
