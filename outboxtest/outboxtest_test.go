package outboxtest

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/commitbox/commitbox/outbox"
)

// fake is a destination in memory with a publisher that is right, or wrong in one way.
type fake struct {
	wrong string

	mu     sync.Mutex
	held   []outbox.Record
	refuse func(outbox.Record) bool
	away   bool
	broken bool // it was away once, and the publisher does not get over it
	silent chan struct{}
}

func (f *fake) StopsKeyAtFirstFailure() bool { return true }

func (f *fake) Publish(ctx context.Context, batch []outbox.Record) []error {
	errs := make([]error, len(batch))
	stopped := map[string]bool{}
	for i, r := range batch {
		if stopped[r.Key] && f.wrong != "goes on" {
			errs[i] = outbox.ErrNotTried
			continue
		}
		if errs[i] = f.send(ctx, r); errs[i] != nil {
			stopped[r.Key] = r.Key != ""
		}
	}
	switch f.wrong {
	case "short answer":
		return errs[:max(0, len(errs)-1)]
	case "changes records":
		if len(batch) > 0 {
			batch[0].Topic = "x"
		}
	case "one fails, all fail":
		if err := errors.Join(errs...); err != nil {
			for i := range errs {
				errs[i] = outbox.Unavailable(err)
			}
		}
	}
	return errs
}

func (f *fake) send(ctx context.Context, r outbox.Record) error {
	f.mu.Lock()
	silent := f.silent
	f.mu.Unlock()
	if silent != nil {
		if f.wrong == "deaf" {
			<-silent
		}
		select {
		case <-silent:
		case <-ctx.Done():
			if f.wrong == "hopes" {
				return nil
			}
			return ctx.Err()
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.away && f.wrong == "ignores absence", f.refuse != nil && f.refuse(r) && f.wrong == "ignores refusals":
		return nil
	case f.away, f.broken:
		f.broken = f.wrong == "never recovers"
		return outbox.Unavailable(errors.New("away"))
	case f.refuse != nil && f.refuse(r):
		return errors.New("refused")
	}
	if f.wrong == "drops headers" {
		r.Headers = nil
	}
	f.held = append(f.held, r)
	if f.wrong == "reverses" {
		slices.Reverse(f.held)
	}
	return nil
}

func (f *fake) subject() Subject {
	lock := func(change func()) {
		f.mu.Lock()
		defer f.mu.Unlock()
		change()
	}
	return Subject{
		Publisher: f, Timeout: time.Second,
		Received: func() (held []outbox.Record) { lock(func() { held = slices.Clone(f.held) }); return held },
		Refuse:   func(refused func(outbox.Record) bool) { lock(func() { f.refuse = refused }) },
		Away:     func(away bool) { lock(func() { f.away = away }) },
		Silent: func(silent bool) {
			lock(func() {
				if silent {
					f.silent = make(chan struct{})
				} else {
					close(f.silent)
					f.silent = nil
				}
			})
		},
	}
}

func TestASoundPublisherPasses(t *testing.T) {
	TestPublisher(t, func(*testing.T) Subject { return (&fake{}).subject() })
}

func TestEveryFaultIsFound(t *testing.T) {
	for wrong, found := range map[string]string{
		"short answer":        "confirmed messages are held as given",
		"changes records":     "confirmed messages are held as given",
		"drops headers":       "confirmed messages are held as given",
		"reverses":            "messages of one key arrive in order of the calls",
		"ignores refusals":    "a refusal at each position",
		"one fails, all fail": "a refusal at each position",
		"goes on":             "a key is stopped at its first failure, if that is declared",
		"ignores absence":     "a destination that is away, and back",
		"never recovers":      "a destination that is away, and back",
		"deaf":                "a destination that does not answer",
		"hopes":               "a destination that does not answer",
	} {
		t.Run(wrong, func(t *testing.T) {
			t.Parallel()
			i := slices.IndexFunc(checks, func(c check) bool { return c.name == found })
			f := &fake{wrong: wrong}
			if err := checks[i].run(f.subject()); err == nil {
				t.Errorf("%q passes the check %q", wrong, found)
			} else {
				t.Log(err)
			}
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.silent != nil {
				close(f.silent)
			}
		})
	}
}

func TestPublishFuncKeepsTheContract(t *testing.T) {
	TestPublisher(t, func(*testing.T) Subject {
		f := &fake{}
		s := f.subject()
		s.Publisher = outbox.PublishFunc(f.send)
		return s
	})
}
