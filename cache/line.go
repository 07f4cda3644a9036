package cache

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"
)

const (
	lineMax      = 128       // commands of one pipeline
	lineBytesMax = 256 << 10 // bytes of one pipeline, unless its only command has more
	linesOpen    = 2         // pipelines on their way, so that one that is stuck does not hold up all

	gatherFor = 5 * time.Millisecond // how long a copy, for which nobody waits, waits for others
)

// line sends commands of concurrent callers in pipelines: what comes while one is on its way goes with the next. Nobody who
// waits for an answer waits for company. Under load it saves most of the system calls of both sides. A pipeline is bounded in
// bytes, because its last answer comes after all that is before it; how long answers will be is guessed from the longest one of
// the last pipeline.
type line struct {
	client  redis.UniversalClient
	timeout time.Duration // of a pipeline
	gather  time.Duration // how long a pipeline waits for company
	alone   bool          // each command goes by itself

	mu        sync.Mutex
	waiting   []passenger
	open      int
	gathering bool // one of those that are open waits for company
	answer    int  // bytes of the longest answer in the last pipeline
}

// passenger is a command that waits for its answer, which will be in the command itself.
type passenger struct {
	command  redis.Cmder
	bytes    int       // that it sends
	until    time.Time // nobody waits for it any longer
	answered func()
}

// newLine returns a line to one server. A pipeline to the servers of a cluster would wait for the slowest of them, so that
// one that hangs would hold up what the others answer.
func newLine(client redis.UniversalClient, timeout, gather time.Duration) *line {
	_, single := client.(*redis.Client)
	return &line{client: client, timeout: timeout, gather: gather, alone: !single}
}

// add sends a command and does not wait: answered is called once, when the command was answered or has failed.
func (l *line) add(p passenger) {
	if l.alone {
		go l.exec([]passenger{p})
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.waiting = append(l.waiting, p)
	if l.open < linesOpen && !l.gathering {
		l.open++
		l.gathering = l.gather > 0
		go l.run()
	}
}

// run sends pipelines until nobody waits, or another one is about to send what is left.
func (l *line) run() {
	for again := true; again; again = l.again() {
		time.Sleep(l.gather)
		if batch := l.next(); len(batch) > 0 {
			l.exec(batch)
		}
	}
}

func (l *line) next() []passenger {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.gathering = false
	n := l.fit()
	batch := l.waiting[:n:n]
	l.waiting = l.waiting[n:]
	return batch
}

// again says whether to send one more, and closes what has nothing to send.
func (l *line) again() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gathering || len(l.waiting) == 0 {
		l.open--
		if len(l.waiting) == 0 {
			l.waiting = nil
		}
		return false
	}
	l.gathering = l.gather > 0
	return true
}

// fit returns how many of those who wait go together.
func (l *line) fit() (n int) {
	for left := lineBytesMax; n < min(len(l.waiting), lineMax); n++ {
		if left -= l.waiting[n].bytes + l.answer; left < 0 && n > 0 {
			break
		}
	}
	return n
}

// exec sends what somebody still waits for: after a pipeline that was stuck, the server is not to be busy with the rest.
func (l *line) exec(batch []passenger) {
	now := time.Now()
	ctx, cancel := context.WithDeadline(context.Background(), now.Add(l.timeout))
	defer cancel()
	pipe := l.client.Pipeline()
	for _, p := range batch {
		if now.After(p.until) {
			p.command.SetErr(errBudget)
			continue
		}
		_ = pipe.Process(ctx, p.command)
	}
	switch pipe.Len() {
	case 0:
	case 1:
		_ = l.client.Process(ctx, pipe.Cmds()[0]) // the command has the error
	default:
		_, _ = pipe.Exec(ctx) // so have these
	}
	longest := 0
	for _, p := range batch {
		if value, ok := p.command.(*redis.StringCmd); ok {
			longest = max(longest, len(value.Val()))
		}
	}
	l.mu.Lock()
	l.answer = longest
	l.mu.Unlock()
	for _, p := range batch {
		p.answered()
	}
}
