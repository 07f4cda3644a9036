// Package devserver starts real servers (PostgreSQL, Redis, RabbitMQ,
// PgBouncer) from the binaries on this machine, for tests and development.
//
// Every server listens on loopback only, on a free port, and keeps its files
// in one private folder below [os.TempDir]. It needs no configuration, no root
// and no system service; when the caller is root the server runs as an
// unprivileged account, because PostgreSQL and PgBouncer refuse to run as root.
//
// A server does not outlive the process that started it: [Server.Stop] ends it
// and removes its folder, and on Linux the kernel kills it when its starter
// dies in any other way. A folder that such a death leaves behind is removed by
// the next start of any server.
package devserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

const (
	startTimeout = 2 * time.Minute
	stopTimeout  = 20 * time.Second
	pollInterval = 15 * time.Millisecond
)

// errStopped is what a stopped Server answers to every further request.
var errStopped = errors.New("devserver: the server was stopped and its folder is gone; start a new one")

// Server is one running server. Its methods are safe for concurrent use; they
// run one after the other.
type Server struct {
	url        string
	dir        string
	command    command
	helpers    []*process
	node       rabbitNode
	stopSignal syscall.Signal
	ready      func(context.Context) error
	revive     bool // it is started again if it ends unasked

	mu      sync.Mutex
	process *process
	stopped bool
}

// URL is the address a client connects to. It stays the same after
// [Server.Restart].
func (s *Server) URL() string { return s.url }

// Dir is the private folder that holds the server's data, configuration and
// log.
func (s *Server) Dir() string { return s.dir }

// Pid is the process id of the server's main process. It changes with
// [Server.Restart].
func (s *Server) Pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.process.pid
}

// Stop ends the server in an orderly way, by force after 20 seconds, and
// removes its folder. A paused or killed server can be stopped too. Further
// calls do nothing.
func (s *Server) Stop() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil
	}
	s.stopped = true
	err := s.process.stop(s.stopSignal)
	for _, h := range s.helpers {
		err = errors.Join(err, h.kill())
	}
	return errors.Join(err, removeFolder(s.dir))
}

// Kill ends the main process and all its descendants with SIGKILL, as a crash
// of the machine would, and returns when they are gone. The data stays, so that
// [Server.Restart] recovers from it.
func (s *Server) Kill() error {
	return s.whileKept(func() error { return s.process.kill() })
}

// Pause freezes the server (SIGSTOP to all its processes): connections stay
// open and nothing answers.
func (s *Server) Pause() error {
	return s.whileKept(func() error { return s.process.signalTree(syscall.SIGSTOP) })
}

// Resume lets a paused server go on.
func (s *Server) Resume() error {
	return s.whileKept(func() error { return s.process.signalTree(syscall.SIGCONT) })
}

// Restart starts the server again on the same port and data, and returns when
// it answers. A server that still runs is ended in an orderly way first.
func (s *Server) Restart(ctx context.Context) error {
	return s.whileKept(func() error {
		if err := s.process.stop(s.stopSignal); err != nil {
			return err
		}
		return s.start(ctx)
	})
}

func (s *Server) whileKept(do func() error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return errStopped
	}
	return do()
}

// open takes the steps that prepare a server, and starts it. When something
// fails nothing is left.
func open(ctx context.Context, s *Server, steps ...func(context.Context) error) (*Server, error) {
	s.process = endedProcess()
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return nil, errors.Join(err, s.Stop())
		}
	}
	if err := s.start(ctx); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// start launches the main process and waits until a client can use it.
func (s *Server) start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	p, err := launch(s.command)
	if err != nil {
		return err
	}
	if err := p.waitReady(ctx, s.ready); err != nil {
		err = fmt.Errorf("devserver: %s did not become ready: %w\n%s", filepath.Base(s.command.path), err, logTail(s.command.log))
		return errors.Join(err, p.kill())
	}
	s.process = p
	if s.revive {
		go s.reviveAfter(p)
	}
	return nil
}

// reviveAfter starts the server again when it ends although nobody asked it to.
func (s *Server) reviveAfter(p *process) {
	<-p.done
	_ = s.whileKept(func() error { // who waits for it finds it missing
		if p.asked.Load() || s.process != p {
			return nil
		}
		return s.start(context.Background())
	})
}

// logTail returns the end of a log file, for error messages.
func logTail(name string) string {
	const keep = 2000
	b, err := os.ReadFile(name)
	if err != nil {
		return ""
	}
	return string(b[max(0, len(b)-keep):])
}
