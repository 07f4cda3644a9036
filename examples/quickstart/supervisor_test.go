package main

import (
	"errors"
	"os/exec"
	"strconv"
	"testing"

	"github.com/commitbox/commitbox/outbox"
)

// ended is a process that has ended by itself.
type ended struct{ cause error }

func (e ended) kill()       {}
func (e ended) stop() error { return e.cause }
func (e ended) wait() error { return e.cause }

func TestStalledRelayIsStartedAgain(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		cause  error
		starts int
	}{
		"stalled":       {outbox.ErrPublishStalled, 1 + stallsMax},
		"another error": {errors.New("x"), 1},
		"no error":      {nil, 1},
	} {
		starts := 0
		failed := make(chan error, 1)
		s := newSupervisor(func(string) (process, error) {
			starts++
			return ended{c.cause}, nil
		}, func(err error) { failed <- err })
		if err := s.launch(relayName); err != nil {
			t.Fatal(err)
		}
		if err := <-failed; !errors.Is(err, c.cause) && c.cause != nil {
			t.Errorf("%s: the run fails with %v", name, err)
		}
		if starts != c.starts {
			t.Errorf("%s: %d starts, want %d", name, starts, c.starts)
		}
	}
}

func TestStalledRelayMayBeStopped(t *testing.T) {
	t.Parallel()
	for cause, isError := range map[error]bool{outbox.ErrPublishStalled: false, errors.New("x"): true} {
		s := newSupervisor(nil, nil)
		s.running[relayName] = ended{cause}
		if err := s.stop(relayName); (err != nil) != isError {
			t.Errorf("stop after %v: %v", cause, err)
		}
	}
}

func TestChildTellsOfItsStall(t *testing.T) {
	t.Parallel()
	for _, cause := range []error{nil, errors.New("x"), outbox.ErrPublishStalled} {
		status := exitStatus(cause)
		err := childError(exec.Command("sh", "-c", "exit \"$0\"", strconv.Itoa(status)).Run())
		if errors.Is(err, outbox.ErrPublishStalled) != errors.Is(cause, outbox.ErrPublishStalled) || (err == nil) != (cause == nil) {
			t.Errorf("%v is told as %v", cause, err)
		}
	}
}
