package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// holdCommand is the subcommand of the background process that owns the services
// that up starts.
const holdCommand = "hold"

const (
	stateFile = "services.json"
	lockFile  = "services.lock" // the background process keeps it locked
	logFile   = "services.log"
)

// state is what the background process writes for the other subcommands.
type state struct {
	Pid         int
	Environment environment
}

// up starts the services in a background process, or finds them running.
func up(ctx context.Context, root string, args []string) error {
	if s, err := currentState(root); err != nil || s != nil {
		return errors.Join(err, printState(s))
	}
	ended, err := startHolder(root, args)
	if err != nil {
		return err
	}
	for {
		s, err := currentState(root)
		if err != nil || s != nil {
			return errors.Join(err, printState(s))
		}
		select {
		case <-ended:
			return holderFailed(root)
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// startHolder starts the background process in a session of its own; the channel
// is closed when that process ends.
func startHolder(root string, args []string) (<-chan struct{}, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	name, err := buildDir(root, logFile)
	if err != nil {
		return nil, err
	}
	log, err := os.Create(name)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(self, append([]string{holdCommand}, args...)...)
	cmd.Dir = root
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	return ended, nil
}

func holderFailed(root string) error {
	name, err := buildDir(root, logFile)
	if err != nil {
		return err
	}
	log, err := os.ReadFile(name)
	return errors.Join(fmt.Errorf("the services did not start: %s", strings.TrimSpace(string(log))), err)
}

// hold is the background process: it starts the services, says so in the state
// file, and stops them when it gets a signal.
func hold(ctx context.Context, w want) error {
	unlock, err := lock(w.root)
	if err != nil {
		return err
	}
	defer unlock()
	g, err := startAll(ctx, w)
	if err != nil {
		return err
	}
	if err := writeState(w.root, state{Pid: os.Getpid(), Environment: g.env}); err != nil {
		return errors.Join(err, g.stop())
	}
	<-ctx.Done()
	return errors.Join(g.stop(), removeState(w.root))
}

// down asks the background process to stop and waits for it.
func down(ctx context.Context, root string) error {
	s, err := currentState(root)
	if err != nil || s == nil {
		return err
	}
	if err := syscall.Kill(s.Pid, syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop process %d: %w", s.Pid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		if s, err := currentState(root); err != nil || s == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("process %d still stops the services: %w", s.Pid, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func status(root string) error {
	s, err := currentState(root)
	if err != nil {
		return err
	}
	if s == nil {
		return errors.New("nothing runs in the background")
	}
	return printState(s)
}

// printState prints the environment for the eval of a shell.
func printState(s *state) error {
	if s == nil {
		return nil
	}
	for _, line := range s.Environment.assignments() {
		name, value, _ := strings.Cut(line, "=")
		fmt.Printf("export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`))
	}
	return nil
}

// currentState returns nil if nothing runs in the background; the state of a
// background process that died is removed.
func currentState(root string) (*state, error) {
	name, err := buildDir(root, stateFile)
	if err != nil {
		return nil, err
	}
	content, err := os.ReadFile(name)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if unlock, err := lock(root); err == nil {
		defer unlock()
		return nil, removeState(root)
	}
	s := new(state)
	if err := json.Unmarshal(content, s); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return s, nil
}

// writeState makes the state file appear with its whole content.
func writeState(root string, s state) error {
	name, err := buildDir(root, stateFile)
	if err != nil {
		return err
	}
	content, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	draft := name + ".new"
	if err := os.WriteFile(draft, append(content, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(draft, name)
}

func removeState(root string) error {
	name, err := buildDir(root, stateFile)
	if err != nil {
		return err
	}
	if err := os.Remove(name); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// lock takes the lock that the background process holds as long as it lives; it
// does not wait.
func lock(root string) (unlock func(), err error) {
	name, err := buildDir(root, lockFile)
	if err != nil {
		return nil, err
	}
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("another devservices runs in the background: %w", err), f.Close())
	}
	return func() { _ = f.Close() }, nil
}
