package devserver_test

import (
	"strings"
	"syscall"
)

func processExists(pid int) bool { return syscall.Kill(pid, 0) == nil }

func contains(err error, text string) bool { return strings.Contains(err.Error(), text) }
