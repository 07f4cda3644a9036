package devserver

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// MissingError says that a server's programs are not on this machine.
type MissingError struct {
	Service string   // for example "postgres"
	Looked  []string // where they were looked for
}

func (e *MissingError) Error() string {
	return fmt.Sprintf("devserver: no %s on this machine (looked in %s); install it, or let tools/devservices do it",
		e.Service, strings.Join(e.Looked, ", "))
}

// findBinary returns the first of the given files that can be executed, or what
// name means on PATH.
func findBinary(name string, candidates ...string) (string, error) {
	for _, c := range candidates {
		if executable(c) {
			return c, nil
		}
	}
	path, err := exec.LookPath(name)
	if err != nil {
		return "", &MissingError{Service: name, Looked: append(candidates, "PATH")}
	}
	return filepath.Abs(path)
}

func executable(name string) bool {
	info, err := os.Stat(name)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}
