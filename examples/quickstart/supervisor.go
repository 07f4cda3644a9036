package main

import (
	"errors"
	"fmt"
	"sync"

	"github.com/commitbox/commitbox/outbox"
)

// process is a running component: a child process, or goroutines of this one.
type process interface {
	kill()       // ends it without warning; comes back when it is gone
	stop() error // lets it finish what it holds; comes back when it is gone
	wait() error // comes back when it is gone, with what it ended with
}

// stallsMax is how often in a run the supervisor replaces a relay whose publisher did not come back in time, as happens on
// a machine that is overloaded.
const stallsMax = 5

// supervisor keeps the components running.
type supervisor struct {
	start func(name string) (process, error)
	fail  func(error) // told when a component ends by itself, and is not to be started again

	mu      sync.Mutex
	running map[string]process
	kills   int
	stalls  int
}

func newSupervisor(start func(string) (process, error), fail func(error)) *supervisor {
	return &supervisor{start: start, fail: fail, running: map[string]process{}}
}

// launch starts the named components.
func (s *supervisor) launch(names ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		if err := s.launchLocked(name); err != nil {
			return err
		}
	}
	return nil
}

func (s *supervisor) launchLocked(name string) error {
	p, err := s.start(name)
	if err != nil {
		return fmt.Errorf("start %s: %w", name, err)
	}
	s.running[name] = p
	go func() {
		err := p.wait()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.running[name] == p {
			s.replaceLocked(name, err)
		}
	}()
	return nil
}

// replaceLocked starts a component again that ended by itself with [outbox.ErrPublishStalled]. Any other end is the end of
// the run.
func (s *supervisor) replaceLocked(name string, cause error) {
	if !errors.Is(cause, outbox.ErrPublishStalled) || s.stalls == stallsMax {
		s.fail(errors.Join(fmt.Errorf("%s ended by itself", name), cause))
		return
	}
	s.stalls++
	if err := s.launchLocked(name); err != nil {
		s.fail(err)
	}
}

func (s *supervisor) killAndRestart(name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.running[name]
	if p == nil {
		return nil // everything is being stopped
	}
	delete(s.running, name)
	p.kill()
	s.kills++
	return s.launchLocked(name)
}

// stop ends the named components gently, in that order. What a stalled relay holds is taken over when its lease has ended.
func (s *supervisor) stop(names ...string) error {
	var errs []error
	for _, name := range names {
		s.mu.Lock()
		p := s.running[name]
		delete(s.running, name)
		s.mu.Unlock()
		if p == nil {
			continue
		}
		if err := p.stop(); err != nil && !errors.Is(err, outbox.ErrPublishStalled) {
			errs = append(errs, fmt.Errorf("stop %s: %w", name, err))
		}
	}
	return errors.Join(errs...)
}
