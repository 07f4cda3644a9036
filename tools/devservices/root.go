package main

import (
	"errors"
	"os"
	"path/filepath"
)

// repositoryRoot is the nearest folder, from the current one upwards, that holds
// tools/devservices.
func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		if info, err := os.Stat(filepath.Join(dir, "tools", "devservices")); err == nil && info.IsDir() {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", errors.New("run it inside the repository: no folder above this one holds tools/devservices")
		}
		dir = parent
	}
}

// commandDir is where the command of run starts.
func commandDir(root string) (string, error) {
	dir, err := os.Getwd()
	if err == nil && dir == filepath.Join(root, "tools") {
		return root, nil
	}
	return dir, err
}

// buildDir returns a folder below .build and makes .build.
func buildDir(root, name string) (string, error) {
	build := filepath.Join(root, ".build")
	return filepath.Join(build, name), os.MkdirAll(build, 0o755)
}
