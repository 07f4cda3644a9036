package devserver

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// dieWithParent makes the kernel kill the child when the thread that starts it
// ends.
func dieWithParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGKILL }

// stat is what /proc/<pid>/stat says about a process.
type stat struct {
	state  byte
	parent int
	start  string // clock ticks since boot; tells two users of one pid apart
}

func readStat(pid int) (stat, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return stat{}, err
	}
	// The command name in parentheses may contain anything; fields count from
	// behind its last parenthesis.
	f := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(f) < 20 {
		return stat{}, fmt.Errorf("devserver: /proc/%d/stat has only %d fields", pid, len(f))
	}
	parent, err := strconv.Atoi(f[1])
	return stat{state: f[0][0], parent: parent, start: f[19]}, err
}

// startTime identifies a process together with its pid; empty if there is none.
func startTime(pid int) string {
	s, err := readStat(pid)
	if err != nil {
		return ""
	}
	return s.start
}

// alive reports whether the process exists and is more than a zombie.
func alive(pid int) bool {
	s, err := readStat(pid)
	return err == nil && s.state != 'Z' && s.state != 'X'
}

// descendants returns all children, grandchildren and so on of a process.
func descendants(root int) []int {
	children := make(map[int][]int)
	for _, pid := range processes() {
		if s, err := readStat(pid); err == nil {
			children[s.parent] = append(children[s.parent], pid)
		}
	}
	found := children[root]
	for i := 0; i < len(found); i++ {
		found = append(found, children[found[i]]...)
	}
	return found
}

func processes() []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var pids []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// livesIn reports whether a process works in a folder or was started with it
// on its command line.
func livesIn(pid int, folder string) bool {
	cwd, err := os.Readlink(fmt.Sprintf("/proc/%d/cwd", pid))
	if err == nil && (cwd == folder || strings.HasPrefix(cwd, folder+"/")) {
		return true
	}
	args, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && bytes.Contains(args, []byte(folder+"/"))
}
