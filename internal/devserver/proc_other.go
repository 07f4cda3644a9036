//go:build unix && !linux

package devserver

import "syscall"

// Without /proc and a parent death signal a server ends through Stop only, its
// descendants are not seen, and leftovers of a killed starter are not ended.

func dieWithParent(*syscall.SysProcAttr) {}

func startTime(pid int) string {
	if alive(pid) {
		return "0"
	}
	return ""
}

func alive(pid int) bool { return syscall.Kill(pid, 0) != syscall.ESRCH }

func descendants(int) []int { return nil }

func livesIn(int, string) bool { return false }
