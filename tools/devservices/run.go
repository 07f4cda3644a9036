package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"syscall"
	"time"
)

const binVariable = "COMMITBOX_PG_BIN"

// environment holds the variables that lead to the services.
type environment map[string]string

// running is a service that clients can use.
type running struct {
	url  string
	stop func() error
}

// group is what was started together.
type group struct {
	env     environment
	started []running
}

// startAll gets every wanted service; when one fails, all are stopped.
func startAll(ctx context.Context, w want) (*group, error) {
	g := &group{env: make(environment)}
	for _, s := range w.services {
		r, err := s.obtain(ctx, w, g.env)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("start %s: %w", s.name, err), g.stop())
		}
		g.env[s.variable] = r.url
		g.started = append(g.started, r)
	}
	return g, nil
}

// stop ends the services, the last started first.
func (g *group) stop() error {
	var err error
	for _, r := range slices.Backward(g.started) {
		err = errors.Join(err, r.stop())
	}
	return err
}

// assignments returns the environment as NAME=value, sorted.
func (e environment) assignments() []string {
	var lines []string
	for _, name := range slices.Sorted(maps.Keys(e)) {
		lines = append(lines, name+"="+e[name])
	}
	return lines
}

// run starts the services, runs the command with their addresses and returns its
// exit status.
func run(ctx context.Context, w want, args []string) (int, error) {
	if len(args) == 0 {
		return 2, errUsage
	}
	g, err := startAll(ctx, w)
	if err != nil {
		return 1, err
	}
	code, err := runCommand(ctx, w.root, args, g.env)
	return code, errors.Join(err, g.stop())
}

// runCommand runs the user's command. When ctx ends, the command is asked to end
// and killed ten seconds later.
func runCommand(ctx context.Context, root string, args []string, env environment) (int, error) {
	dir, err := commandDir(root)
	if err != nil {
		return 1, err
	}
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), env.assignments()...)
	cmd.Env = append(cmd.Env, "PWD="+dir)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	err = cmd.Run()
	if cmd.ProcessState == nil {
		return 127, err // it could not be started
	}
	return exitStatus(cmd.ProcessState), nil
}

// exitStatus is the status that a shell would report.
func exitStatus(p *os.ProcessState) int {
	if w, ok := p.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return 128 + int(w.Signal())
	}
	return p.ExitCode()
}
