package cache

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	lineMax   = 128 // commands of one pipeline
	linesOpen = 2   // pipelines on their way, so that one that is stuck does not hold up all
)

// line sends commands of concurrent callers in pipelines: what comes while one is on its way goes with the next. Nobody waits
// for company. Under load it saves most of the system calls of both sides.
type line struct {
	client  redis.UniversalClient
	timeout time.Duration // of a pipeline

	mu      sync.Mutex
	waiting []passenger
	open    int
}

// passenger is a command that waits for its answer, which will be in the command itself.
type passenger struct {
	command  redis.Cmder
	answered chan struct{}
}

// send returns once the command was answered or has failed, or when ctx has ended: then the command is not to be looked at
// any more, because its answer may still come.
func (l *line) send(ctx context.Context, command redis.Cmder) error {
	p := passenger{command, make(chan struct{})}
	l.mu.Lock()
	l.waiting = append(l.waiting, p)
	if l.open < linesOpen {
		l.open++
		go l.run()
	}
	l.mu.Unlock()
	select {
	case <-p.answered:
		return command.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run sends pipelines until nobody waits.
func (l *line) run() {
	for {
		batch := l.next()
		if len(batch) == 0 {
			return
		}
		l.exec(batch)
	}
}

func (l *line) next() []passenger {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := min(len(l.waiting), lineMax)
	if n == 0 {
		l.open--
		l.waiting = nil
		return nil
	}
	batch := l.waiting[:n:n]
	l.waiting = l.waiting[n:]
	return batch
}

func (l *line) exec(batch []passenger) {
	ctx, cancel := context.WithTimeout(context.Background(), l.timeout)
	defer cancel()
	defer func() {
		for _, p := range batch {
			close(p.answered)
		}
	}()
	if len(batch) == 1 {
		_ = l.client.Process(ctx, batch[0].command) // the command has the error
		return
	}
	pipe := l.client.Pipeline()
	for _, p := range batch {
		_ = pipe.Process(ctx, p.command)
	}
	_, _ = pipe.Exec(ctx) // so have these
}
