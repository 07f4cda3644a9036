package inboxtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/commitbox/commitbox/inbox"
)

// TestCache checks an [inbox.Cache], each demand as a subtest. open is called once per subtest. Not promised: what the
// store behind it does in a failover.
func TestCache(t *testing.T, open func(t *testing.T) inbox.Cache) { runChecks(t, open, cacheChecks) }

// TestGuard checks an [inbox.Guard], each demand as a subtest. open is called once per subtest. Not promised: what the
// store behind it does in a failover.
func TestGuard(t *testing.T, open func(t *testing.T) inbox.Guard) { runChecks(t, open, guardChecks) }

// storeCheck is a demand on a cache or a guard.
type storeCheck[S any] struct {
	name string
	run  func(ctx context.Context, store S, id inbox.ID) error
}

func runChecks[S any](t *testing.T, open func(t *testing.T) S, checks []storeCheck[S]) {
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), settleMax)
			defer cancel()
			if err := c.run(ctx, open(t), newID()); err != nil {
				t.Error(err)
			}
		})
	}
}

func newID() inbox.ID { return inbox.ID{Consumer: "inboxtest", Message: rand.Text()} }

// here and elsewhere are histories of databases.
var (
	here      = inbox.Identity{System: 1, Timeline: 2, Generation: 3}
	elsewhere = []inbox.Identity{{System: 9, Timeline: 2, Generation: 3}, {System: 1, Timeline: 9, Generation: 3}, {System: 1, Timeline: 2, Generation: 9}}
)

func copyOf(result string) inbox.CacheEntry {
	return inbox.CacheEntry{Fingerprint: []byte{1, 0, 255}, FinishedAt: time.UnixMicro(1_234_567_890_123_456), Result: []byte(result)}
}

var cacheChecks = []storeCheck[inbox.Cache]{
	{"a copy is as it was put", func(ctx context.Context, c inbox.Cache, id inbox.ID) error {
		bare := newID()
		return errors.Join(
			c.Put(ctx, here, id, copyOf("\x02result"), time.Minute), wantCopy(ctx, c, here, id, "\x02result"),
			c.Put(ctx, here, bare, copyOf(""), time.Minute), wantCopy(ctx, c, here, bare, ""),
		)
	}},
	{"a copy is of its id only", func(ctx context.Context, c inbox.Cache, id inbox.ID) error {
		return errors.Join(
			c.Put(ctx, here, id, copyOf("x"), time.Minute), wantNone(ctx, c, here, newID()),
			wantNone(ctx, c, here, inbox.ID{Consumer: id.Consumer + "/" + id.Message, Message: id.Message}),
		)
	}},
	{"a copy is of its history only", func(ctx context.Context, c inbox.Cache, id inbox.ID) error {
		err := c.Put(ctx, here, id, copyOf("x"), time.Minute)
		for _, of := range elsewhere {
			err = errors.Join(err, wantNone(ctx, c, of, id))
		}
		return err
	}},
	{"a copy ends with its row", func(ctx context.Context, c inbox.Cache, id inbox.ID) error {
		past := newID()
		err := errors.Join(c.Put(ctx, here, past, copyOf("x"), 0), wantNone(ctx, c, here, past),
			c.Put(ctx, here, past, copyOf("x"), -time.Hour), wantNone(ctx, c, here, past),
			c.Put(ctx, here, id, copyOf("x"), 50*time.Millisecond))
		if err != nil {
			return err
		}
		return until(ctx, func() error { return wantNone(ctx, c, here, id) })
	}},
}

func wantCopy(ctx context.Context, c inbox.Cache, of inbox.Identity, id inbox.ID, result string) error {
	got, found, err := c.Get(ctx, of, id)
	if err == nil && !found {
		err = errors.New("what was put is not there")
	}
	if err != nil {
		return err
	}
	return sameEntry(got, copyOf(result))
}

func sameEntry(got, want inbox.CacheEntry) error {
	if !bytes.Equal(got.Fingerprint, want.Fingerprint) || !bytes.Equal(got.Result, want.Result) || !got.FinishedAt.Equal(want.FinishedAt) {
		return fmt.Errorf("the entry is %+v, not %+v", got, want)
	}
	return nil
}

func wantNone(ctx context.Context, c inbox.Cache, of inbox.Identity, id inbox.ID) error {
	if _, found, err := c.Get(ctx, of, id); err != nil || found {
		return errors.Join(fmt.Errorf("%s is found: %v", id, found), err)
	}
	return nil
}

// until repeats a check that will come true.
func until(ctx context.Context, check func() error) error {
	for {
		err := check()
		if err == nil {
			return nil
		}
		if stop := pause(ctx); stop != nil {
			return errors.Join(err, stop)
		}
	}
}

var guardChecks = []storeCheck[inbox.Guard]{
	{"one token at a time", func(ctx context.Context, g inbox.Guard, id inbox.ID) error {
		return errors.Join(
			wantState(ctx, g, id, "a", inbox.GuardGranted), wantState(ctx, g, id, "b", inbox.GuardHeld),
			wantState(ctx, g, id, "a", inbox.GuardGranted), wantState(ctx, g, newID(), "b", inbox.GuardGranted),
		)
	}},
	{"another token changes nothing", func(ctx context.Context, g inbox.Guard, id inbox.ID) error {
		return errors.Join(
			wantState(ctx, g, id, "a", inbox.GuardGranted),
			answer(false)(g.Renew(ctx, id, "b", time.Minute)),
			answer(false)(g.Finish(ctx, id, "b", copyOf("b"), time.Minute)),
			answer(false)(g.Release(ctx, id, "b")),
			answer(true)(g.Renew(ctx, id, "a", time.Minute)), wantState(ctx, g, id, "b", inbox.GuardHeld),
		)
	}},
	{"what was given back is free", func(ctx context.Context, g inbox.Guard, id inbox.ID) error {
		return errors.Join(
			wantState(ctx, g, id, "a", inbox.GuardGranted), answer(true)(g.Release(ctx, id, "a")),
			wantState(ctx, g, id, "b", inbox.GuardGranted),
			answer(false)(g.Release(ctx, id, "a")), wantState(ctx, g, id, "c", inbox.GuardHeld),
		)
	}},
	{"a finish stays, and may be repeated", func(ctx context.Context, g inbox.Guard, id inbox.ID) error {
		return errors.Join(
			wantState(ctx, g, id, "a", inbox.GuardGranted),
			answer(true)(g.Finish(ctx, id, "a", copyOf("a"), time.Minute)),
			answer(true)(g.Finish(ctx, id, "a", copyOf("a"), time.Minute)),
			answer(false)(g.Finish(ctx, id, "b", copyOf("b"), time.Minute)),
			answer(false)(g.Release(ctx, id, "a")),
			wantState(ctx, g, id, "b", inbox.GuardDone),
		)
	}},
	{"a lease ends, and its holder is late", func(ctx context.Context, g inbox.Guard, id inbox.ID) error {
		if _, _, _, err := g.Begin(ctx, id, "a", 50*time.Millisecond); err != nil {
			return err
		}
		if err := until(ctx, func() error { return wantState(ctx, g, id, "b", inbox.GuardGranted) }); err != nil {
			return err
		}
		return errors.Join(
			answer(false)(g.Renew(ctx, id, "a", time.Minute)),
			answer(false)(g.Finish(ctx, id, "a", copyOf("a"), time.Minute)),
			answer(false)(g.Release(ctx, id, "a")),
		)
	}},
}

// wantState begins for a minute, and compares the entry of a finished message with a's.
func wantState(ctx context.Context, g inbox.Guard, id inbox.ID, token string, want inbox.GuardState) error {
	state, entry, left, err := g.Begin(ctx, id, token, time.Minute)
	switch {
	case err != nil:
		return err
	case state != want:
		return fmt.Errorf("token %s is told the state %d, not %d", token, state, want)
	case state == inbox.GuardHeld && (left <= 0 || left > time.Minute):
		return fmt.Errorf("%v are left of a lease of a minute", left)
	case state != inbox.GuardDone:
		return nil
	}
	looked, found, err := g.Look(ctx, id)
	if err == nil && !found {
		err = errors.New("Look does not find a finished message")
	}
	return errors.Join(err, sameEntry(entry, copyOf("a")), sameEntry(looked, copyOf("a")))
}

// answer compares what a guard says.
func answer(want bool) func(bool, error) error {
	return func(got bool, err error) error {
		if err == nil && got != want {
			err = fmt.Errorf("the guard says %v, not %v", got, want)
		}
		return err
	}
}
