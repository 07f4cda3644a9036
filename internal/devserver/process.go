package devserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync/atomic"
	"syscall"
	"time"
)

// command says how a process is started.
type command struct {
	path   string
	args   []string
	env    []string // in addition to PATH, HOME and LANG
	folder string   // the server's private folder; working directory, too
	log    string   // file that receives standard output and error
	as     account
}

// process is a started command.
type process struct {
	pid   int
	done  chan struct{} // closed when the process has ended
	asked atomic.Bool   // it was asked to end
}

// endedProcess stands for a process that never came to life.
func endedProcess() *process {
	p := &process{done: make(chan struct{})}
	close(p.done)
	return p
}

// launch starts a command. One operating system thread belongs to the process
// as long as it runs: the kernel's parent death signal is bound to the thread
// that forked, not to the whole parent.
func launch(c command) (*process, error) {
	log, err := os.OpenFile(c.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("devserver: open the log of %s: %w", c.path, err)
	}
	defer log.Close()
	cmd := c.build(context.Background())
	cmd.Stdout, cmd.Stderr = log, log
	dieWithParent(cmd.SysProcAttr)

	p := &process{done: make(chan struct{})}
	started := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // a killed server ends with an error by design
			close(p.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("devserver: start %s: %w", c.path, err)
	}
	p.pid = cmd.Process.Pid
	if err := recordProcess(c.folder, p.pid); err != nil {
		return nil, errors.Join(err, p.kill())
	}
	return p, nil
}

// run executes a command to its end and returns an error with its output when
// it fails.
func run(ctx context.Context, c command) error {
	if out, err := c.build(ctx).CombinedOutput(); err != nil {
		return fmt.Errorf("devserver: %s: %w\n%s", filepath.Base(c.path), err, out)
	}
	return nil
}

func (c command) build(ctx context.Context) *exec.Cmd {
	cmd := exec.CommandContext(ctx, c.path, c.args...)
	cmd.Dir = c.folder
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "HOME=" + c.folder, "LANG=C.UTF-8"}, c.env...)
	// An own process group: Ctrl-C in a terminal reaches the starter only,
	// which then stops its servers in order.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: c.as.credential()}
	return cmd
}

// waitReady polls until ready succeeds, the process ends or ctx is done.
func (p *process) waitReady(ctx context.Context, ready func(context.Context) error) error {
	for {
		attempt, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := ready(attempt)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-p.done:
			return errors.New("it ended during its start")
		case <-ctx.Done():
			return errors.Join(ctx.Err(), err)
		case <-time.After(pollInterval):
		}
	}
}

// stop asks the process to end and kills it if it does not within stopTimeout.
func (p *process) stop(sig syscall.Signal) error {
	p.asked.Store(true)
	if p.ended() {
		return nil
	}
	err := errors.Join(p.signalTree(syscall.SIGCONT), signal(p.pid, sig))
	select {
	case <-p.done:
		return err
	case <-time.After(stopTimeout):
		return errors.Join(err, p.kill())
	}
}

// kill ends the process and its descendants at once and waits for their end.
func (p *process) kill() error {
	p.asked.Store(true)
	if p.ended() {
		return nil
	}
	// A stopped parent starts no child between the look at the tree and the kill.
	if err := signal(p.pid, syscall.SIGSTOP); err != nil {
		return err
	}
	return p.killTree()
}

func (p *process) killTree() error {
	children := descendants(p.pid)
	err := signal(p.pid, syscall.SIGKILL)
	for _, pid := range children {
		err = errors.Join(err, signal(pid, syscall.SIGKILL))
	}
	<-p.done
	return errors.Join(err, waitGone(children))
}

// signalTree sends sig to the process first and then to its descendants.
func (p *process) signalTree(sig syscall.Signal) error {
	if p.ended() {
		return nil
	}
	err := signal(p.pid, sig)
	for _, pid := range descendants(p.pid) {
		err = errors.Join(err, signal(pid, sig))
	}
	return err
}

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// signal sends sig to one process; that it has ended already is no error.
func signal(pid int, sig syscall.Signal) error {
	err := syscall.Kill(pid, sig)
	if err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("devserver: send %v to process %d: %w", sig, pid, err)
	}
	return nil
}

// waitGone waits until none of the processes exists any more.
func waitGone(pids []int) error {
	deadline := time.Now().Add(stopTimeout)
	for _, pid := range pids {
		for alive(pid) {
			if time.Now().After(deadline) {
				return fmt.Errorf("devserver: process %d is still there %v after SIGKILL", pid, stopTimeout)
			}
			time.Sleep(pollInterval)
		}
	}
	return nil
}
