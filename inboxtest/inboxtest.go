// Package inboxtest checks what stands around the inbox. A broker consumer never acks what is not done,
// and never keeps what is. A cache never answers for another row, a guard never lets two work.
package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

// Consumer is the consumer under test, running, with an empty queue of its own.
type Consumer interface {
	// Deliver publishes a message to the queue; an empty id stands for a message without one.
	Deliver(ctx context.Context, id string, payload []byte) error
	// Backlog returns how many deliveries are neither acked nor dead-lettered, those in hand or delayed included.
	Backlog(ctx context.Context) (int, error)
	// DeadLetters returns the ids of the deliveries that were dead-lettered.
	DeadLetters(ctx context.Context) ([]string, error)
}

// Handler is what the consumer calls in [inbox.Process]: as its function, with the message it was called for.
type Handler func(ctx context.Context, tx pgx.Tx, msg inbox.Message) error

// settleMax bounds one check, for a consumer that never settles.
const settleMax = time.Minute

// TestConsumer checks a consumer, each demand as a subtest. open starts a consumer whose box has a short backoff (such
// as 10 ms) and at least five attempts, and which calls the handler; it is called once per subtest and stops the
// consumer in t.Cleanup. Not promised: what happens when its process or the broker dies.
func TestConsumer(t *testing.T, open func(t *testing.T, handler Handler) Consumer) {
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			s := newScene()
			s.Consumer = open(t, s.handle)
			ctx, cancel := context.WithTimeout(t.Context(), settleMax)
			defer cancel()
			if err := c.run(ctx, s); err != nil {
				t.Error(err)
			}
		})
	}
}

func newScene() *scene {
	return &scene{calls: make(map[string]int), held: make(chan struct{}), release: make(chan struct{})}
}

var checks = []struct {
	name string
	run  func(context.Context, *scene) error
}{
	{"copies of a message are handled once and acked", copies},
	{"a failed message is delivered again", failure},
	{"a panic is a failure and the consumer lives", panics},
	{"a message in progress is not acked", inProgress},
	{"a message without an id is dead-lettered and not handled", missingID},
	{"a message that is given up does not stay", givenUp},
}

// scene is one check: the consumer and what its handler has seen.
type scene struct {
	Consumer
	held, release chan struct{} // of the first call for "held"

	mu    sync.Mutex
	calls map[string]int
}

// handle behaves as the message's id says.
func (s *scene) handle(ctx context.Context, _ pgx.Tx, msg inbox.Message) error {
	s.mu.Lock()
	s.calls[msg.ID.Message]++
	n := s.calls[msg.ID.Message]
	s.mu.Unlock()
	switch id := msg.ID.Message; {
	case id == "fails twice" && n <= 2:
		return errors.New("fails")
	case id == "panics once" && n == 1:
		panic("inboxtest: a handler panics")
	case id == "permanent":
		return inbox.Permanent(errors.New("cannot be handled"))
	case id == "held" && n == 1:
		close(s.held)
		select {
		case <-s.release:
		case <-ctx.Done():
		}
		return errors.New("fails after it was held")
	}
	return nil
}

func (s *scene) count(id string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls[id]
}

func (s *scene) deliver(ctx context.Context, ids ...string) error {
	for _, id := range ids {
		if err := s.Deliver(ctx, id, []byte(id)); err != nil {
			return fmt.Errorf("deliver: %w", err)
		}
	}
	return nil
}

// settled waits until nothing is in the queue and compares the number of calls.
func (s *scene) settled(ctx context.Context, id string, calls int) error {
	for {
		n, err := s.Backlog(ctx)
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("%d deliveries were never settled: %w", n, err)
		}
	}
	if got := s.count(id); got != calls {
		return fmt.Errorf("the handler was called %d times, want %d", got, calls)
	}
	return nil
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(10 * time.Millisecond):
		return nil
	}
}

func (s *scene) wantDeadLetters(ctx context.Context, want ...string) error {
	got, err := s.DeadLetters(ctx)
	if err == nil && !slices.Equal(got, want) {
		err = fmt.Errorf("dead letters are %q, want %q", got, want)
	}
	return err
}

func copies(ctx context.Context, s *scene) error {
	if err := s.deliver(ctx, "copy", "copy", "copy"); err != nil {
		return err
	}
	return errors.Join(s.settled(ctx, "copy", 1), s.wantDeadLetters(ctx))
}

func failure(ctx context.Context, s *scene) error {
	if err := s.deliver(ctx, "fails twice"); err != nil {
		return err
	}
	return errors.Join(s.settled(ctx, "fails twice", 3), s.wantDeadLetters(ctx))
}

func panics(ctx context.Context, s *scene) error {
	if err := s.deliver(ctx, "panics once", "after it"); err != nil {
		return err
	}
	return errors.Join(s.settled(ctx, "panics once", 2), s.settled(ctx, "after it", 1), s.wantDeadLetters(ctx))
}

// inProgress holds the first copy, lets the second one be told of it, and then fails the first: the message must be run
// again. (A consumer that takes one delivery at a time sees the second copy later, which is as good.)
func inProgress(ctx context.Context, s *scene) error {
	if err := s.deliver(ctx, "held"); err != nil {
		return err
	}
	select {
	case <-s.held:
	case <-ctx.Done():
		return ctx.Err()
	}
	if err := s.deliver(ctx, "held"); err != nil {
		return err
	}
	var early error
	for range 20 {
		if n, err := s.Backlog(ctx); err != nil || n != 2 {
			early = errors.Join(err, fmt.Errorf("%d of 2 deliveries are left while the first one runs", n))
			break
		}
		if err := pause(ctx); err != nil {
			return err
		}
	}
	close(s.release)
	return errors.Join(early, s.settled(ctx, "held", 2), s.wantDeadLetters(ctx))
}

func missingID(ctx context.Context, s *scene) error {
	if err := s.deliver(ctx, ""); err != nil {
		return err
	}
	return errors.Join(s.settled(ctx, "", 0), s.wantDeadLetters(ctx, ""))
}

// givenUp leaves open whether the delivery is acked or dead-lettered, which depends on where its payload is kept.
func givenUp(ctx context.Context, s *scene) error {
	if err := s.deliver(ctx, "permanent"); err != nil {
		return err
	}
	return s.settled(ctx, "permanent", 1)
}
