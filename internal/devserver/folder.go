package devserver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

const (
	folderPrefix = "commitbox-"
	pidFile      = "pids"
)

// newFolder makes the private folder of a server and gives it to the account.
// Its name carries the pid and start time of the owner, so that even a folder
// whose owner died a moment after its creation can be told to be stale.
func newFolder(kind string, as account) (string, error) {
	sweepStale()
	owner := os.Getpid()
	pattern := fmt.Sprintf("%s%d-%s-%s-", folderPrefix, owner, startTime(owner), kind)
	dir, err := os.MkdirTemp("", pattern)
	if err != nil {
		return "", fmt.Errorf("devserver: make a folder for %s: %w", kind, err)
	}
	if err := as.own(dir); err != nil {
		return "", errors.Join(err, os.RemoveAll(dir))
	}
	return dir, nil
}

func removeFolder(dir string) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("devserver: remove the server's folder: %w", err)
	}
	return nil
}

// recordProcess notes a process in its folder, for the sweep.
func recordProcess(folder string, pid int) error {
	f, err := os.OpenFile(filepath.Join(folder, pidFile), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("devserver: record process %d: %w", pid, err)
	}
	_, err = fmt.Fprintln(f, pid)
	return errors.Join(err, f.Close())
}

// sweepStale removes the folders of dead owners. Errors are left to the next
// sweep: a folder that cannot be removed harms nobody. Containers that share a
// folder for temporary files but do not see each other's processes need a TMPDIR
// each, or they take the other's servers for dead.
func sweepStale() {
	dirs, _ := filepath.Glob(filepath.Join(os.TempDir(), folderPrefix+"*-*"))
	for _, dir := range dirs {
		if staleFolder(dir) {
			endLeftovers(dir)
			_ = os.RemoveAll(dir)
		}
	}
}

// staleFolder reports whether dir has the name of a server's folder whose owner
// is dead.
func staleFolder(dir string) bool {
	part := strings.Split(strings.TrimPrefix(filepath.Base(dir), folderPrefix), "-")
	if len(part) != 4 {
		return false
	}
	owner, err := strconv.Atoi(part[0])
	return err == nil && startTime(owner) != part[1]
}

// endLeftovers kills the processes that a folder lists, with their descendants,
// if they provably live in it: the pid alone may belong to a stranger by now.
func endLeftovers(dir string) {
	list, err := os.ReadFile(filepath.Join(dir, pidFile))
	if err != nil {
		return
	}
	for _, line := range strings.Fields(string(list)) {
		pid, err := strconv.Atoi(line)
		if err != nil || pid <= 1 || !livesIn(pid, dir) {
			continue
		}
		_ = signal(pid, syscall.SIGSTOP)
		tree := append(descendants(pid), pid)
		for _, p := range tree {
			_ = signal(p, syscall.SIGKILL)
		}
		_ = waitGone(tree)
	}
}
