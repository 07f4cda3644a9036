package testenv

import (
	"context"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/internal/devserver"
)

// TestMissingProgramsAreInstalled lets a start fail until devservices has been
// asked; what it is asked for is on the machine already or is installed by it.
func TestMissingProgramsAreInstalled(t *testing.T) {
	t.Parallel()
	starts := 0
	s, err := startOrInstall("redis", func(ctx context.Context) (*devserver.Server, error) {
		starts++
		if starts == 1 {
			return nil, &devserver.MissingError{Service: "redis-server"}
		}
		return devserver.StartRedis(ctx, devserver.RedisOptions{})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err != nil {
		t.Error(err)
	}
	if starts != 2 {
		t.Errorf("%d starts, want 2", starts)
	}
}

func TestFailedInstallSaysBothReasons(t *testing.T) {
	t.Parallel()
	_, err := startOrInstall("nonesuch", func(context.Context) (*devserver.Server, error) {
		return nil, &devserver.MissingError{Service: "nonesuch-server"}
	})
	if err == nil {
		t.Fatal("no error")
	}
	for _, text := range []string{"no nonesuch-server on this machine", `unknown service "nonesuch"`} {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("the error lacks %q: %v", text, err)
		}
	}
}
