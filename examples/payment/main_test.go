package main

import (
	"os"
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
)

// TestMain is also the entry of the child processes.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Getenv(envName) != "" {
		main()
		return
	}
	testenv.Main(m)
}
