package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// memory is a broker in memory with a consumer whose way to settle can be broken.
type memory struct {
	box     *inbox.Box
	handler Handler
	settle  func(error) inbox.Action
	ctx     context.Context
	running sync.WaitGroup

	mu      sync.Mutex
	backlog int
	dead    []string
}

func (m *memory) Deliver(_ context.Context, id string, payload []byte) error {
	m.mu.Lock()
	m.backlog++
	m.mu.Unlock()
	m.running.Go(func() { m.consume(id, payload) })
	return nil
}

func (m *memory) consume(id string, payload []byte) {
	for m.ctx.Err() == nil {
		msg := inbox.Message{ID: inbox.ID{Consumer: "c", Message: id}, Payload: payload}
		_, err := inbox.Process(m.ctx, m.box, msg, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			return inbox.Void{}, m.handler(ctx, tx, msg)
		})
		action := m.settle(err)
		if action.Verdict == inbox.Retry {
			time.Sleep(min(action.After, 20*time.Millisecond))
			continue
		}
		m.mu.Lock()
		defer m.mu.Unlock()
		m.backlog--
		if action.Verdict == inbox.DeadLetter {
			m.dead = append(m.dead, id)
		}
		return
	}
}

func (m *memory) Backlog(context.Context) (int, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.backlog, nil
}

func (m *memory) DeadLetters(context.Context) ([]string, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.dead, nil
}

// open starts a consumer that settles in a given way and ends with the test.
func open(t *testing.T, handler Handler, settle func(error) inbox.Action) *memory {
	t.Helper()
	cfg := inbox.Config{BackoffBase: 10 * time.Millisecond, BackoffMax: 20 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)}
	box, err := inbox.New(testenv.Database(t).Pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	m := &memory{box: box, handler: handler, settle: settle, ctx: ctx}
	t.Cleanup(func() {
		cancel()
		m.running.Wait()
	})
	return m
}

func TestASoundConsumerPasses(t *testing.T) {
	t.Parallel()
	TestConsumer(t, func(t *testing.T, handler Handler) Consumer { return open(t, handler, inbox.Disposition) })
}

func TestEveryFaultIsFound(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		settle func(error) inbox.Action
		found  string
	}{
		"acks everything": {func(error) inbox.Action { return inbox.Action{Verdict: inbox.Ack} }, "delivered again"},
		"acks what is in progress": {func(err error) inbox.Action {
			if strings.Contains(err.Error(), inbox.ErrInProgress.Error()) {
				return inbox.Action{Verdict: inbox.Ack}
			}
			return inbox.Disposition(err)
		}, "in progress is not acked"},
		"dead-letters failures": {func(err error) inbox.Action {
			if err != nil {
				return inbox.Action{Verdict: inbox.DeadLetter}
			}
			return inbox.Disposition(err)
		}, "delivered again"},
		"acks what has no id": {func(err error) inbox.Action {
			if action := inbox.Disposition(err); action.Verdict == inbox.Retry {
				return action
			}
			return inbox.Action{Verdict: inbox.Ack}
		}, "without an id"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := faults(t, c.settle); err == nil || !strings.Contains(err.Error(), c.found) {
				t.Errorf("found %v, want %q", err, c.found)
			}
		})
	}
}

// faults runs the checks against a consumer that settles errors in a given way.
func faults(t *testing.T, settle func(error) inbox.Action) error {
	ctx, cancel := context.WithTimeout(t.Context(), settleMax)
	defer cancel()
	var errs []error
	for _, c := range checks {
		s := newScene()
		s.Consumer = open(t, s.handle, func(err error) inbox.Action {
			if err == nil {
				return inbox.Disposition(nil)
			}
			return settle(err)
		})
		if err := c.run(ctx, s); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", c.name, err))
		}
	}
	return errors.Join(errs...)
}
