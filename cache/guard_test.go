package cache_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// take begins and demands a state.
func take(t testing.TB, c *cache.Cache, id inbox.ID, token string, want inbox.GuardState) (inbox.CacheEntry, time.Duration) {
	t.Helper()
	state, entry, left, err := c.Begin(context.Background(), id, token, time.Minute)
	if err != nil || state != want {
		t.Fatalf("%s: state %d, %v; want %d", token, state, err, want)
	}
	return entry, left
}

// says demands an answer of Renew, Finish or Release.
func says(t testing.TB, want bool) func(bool, error) {
	return func(got bool, err error) {
		t.Helper()
		if err != nil || got != want {
			t.Fatalf("it says %v, %v; want %v", got, err, want)
		}
	}
}

// TestB2_TwoStatesAndALease walks a message through the states of the guard.
func TestB2_TwoStatesAndALease(t *testing.T) {
	t.Parallel()
	c := open(t, connect(t, testenv.Redis(t)))
	ctx, id := t.Context(), newID()
	take(t, c, id, "a", inbox.GuardGranted)
	if _, left := take(t, c, id, "b", inbox.GuardHeld); left <= 30*time.Second || left > time.Minute {
		t.Errorf("%v of the lease are left, want a minute", left)
	}
	if _, known, err := c.Look(ctx, id); known || err != nil {
		t.Errorf("an unfinished message is known: %v", err)
	}
	says(t, true)(c.Renew(ctx, id, "a", time.Minute))
	says(t, false)(c.Renew(ctx, id, "b", time.Minute))
	says(t, false)(c.Finish(ctx, id, "b", completed("b"), time.Minute))
	says(t, false)(c.Release(ctx, id, "b"))
	says(t, true)(c.Finish(ctx, id, "a", completed("a"), time.Minute))
	entry, _ := take(t, c, id, "b", inbox.GuardDone)
	wantEntry(t, entry, completed("a"))
	entry, known, err := c.Look(ctx, id)
	if err != nil || !known {
		t.Fatalf("known %v, %v", known, err)
	}
	wantEntry(t, entry, completed("a"))
	for _, token := range []string{"a", "b"} {
		says(t, false)(c.Renew(ctx, id, token, time.Minute))
		says(t, false)(c.Release(ctx, id, token))
	}
	says(t, false)(c.Finish(ctx, id, "b", completed("b"), time.Minute))
	wantMiss(t, c, inbox.Identity{}, id) // the guard and the copies of rows do not mix
}

// TestB1_UndoByTheOwnersToken shows that failed work leaves no mark, and that only its owner takes the mark away.
func TestB1_UndoByTheOwnersToken(t *testing.T) {
	t.Parallel()
	c := open(t, connect(t, testenv.Redis(t)))
	ctx, id := t.Context(), newID()
	take(t, c, id, "a", inbox.GuardGranted)
	says(t, true)(c.Release(ctx, id, "a"))
	take(t, c, id, "b", inbox.GuardGranted)
	says(t, false)(c.Release(ctx, id, "a"))
	take(t, c, id, "c", inbox.GuardHeld)
}

// TestF28_EveryStepMayBeRepeated repeats each call as a client does that lost the answer.
func TestF28_EveryStepMayBeRepeated(t *testing.T) {
	t.Parallel()
	c := open(t, connect(t, testenv.Redis(t)))
	ctx, id := t.Context(), newID()
	for range 2 {
		take(t, c, id, "a", inbox.GuardGranted)
	}
	for range 2 {
		says(t, true)(c.Renew(ctx, id, "a", time.Minute))
	}
	for range 2 {
		says(t, true)(c.Finish(ctx, id, "a", completed("a"), time.Minute))
	}
}

// TestB43_ALateHolderChangesNothing lets a lease run out, with and without a successor.
func TestB43_ALateHolderChangesNothing(t *testing.T) {
	t.Parallel()
	c := open(t, connect(t, testenv.Redis(t)))
	ctx, id := t.Context(), newID()
	if _, _, _, err := c.Begin(ctx, id, "a", 30*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		state, _, _, err := c.Begin(ctx, id, "b", time.Minute)
		if err != nil || state != inbox.GuardGranted {
			return fmt.Errorf("state %d, %w", state, err)
		}
		return nil
	})
	says(t, false)(c.Renew(ctx, id, "a", time.Hour))
	says(t, false)(c.Finish(ctx, id, "a", completed("a"), time.Minute))
	says(t, false)(c.Release(ctx, id, "a"))
	says(t, true)(c.Finish(ctx, id, "b", completed("b"), time.Minute))
}

// TestB44_AFinishOutlivesALostToken loses the token as a failover or a flush does.
func TestB44_AFinishOutlivesALostToken(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	c := open(t, client, prefix("b44"))
	ctx, id := t.Context(), newID()
	take(t, c, id, "a", inbox.GuardGranted)
	must(t, client.Del(ctx, guardKey("b44", id)).Err())
	says(t, false)(c.Renew(ctx, id, "a", time.Minute))
	says(t, true)(c.Finish(ctx, id, "a", completed("a"), time.Minute))
	take(t, c, id, "b", inbox.GuardDone)
}

// TestOneOfManyTakesIt lets many take a message at once, and the next one when its holder gives it back.
func TestOneOfManyTakesIt(t *testing.T) {
	t.Parallel()
	c := open(t, connect(t, testenv.Redis(t)))
	id := newID()
	var granted atomic.Int32
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			state, _, _, err := c.Begin(context.Background(), id, fmt.Sprint(i), time.Minute)
			if err != nil {
				t.Error(err)
			} else if state == inbox.GuardGranted {
				granted.Add(1)
			}
		})
	}
	all.Wait()
	if granted.Load() != 1 {
		t.Errorf("%d took it", granted.Load())
	}
}

// TestF29_AForgedFinishHoldsNothing puts values in a guard's key that nobody of ours wrote.
func TestF29_AForgedFinishHoldsNothing(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	for name, c := range map[string]struct {
		found string
		spoil func(k string) error
	}{
		"another type":     {"unreadable", func(k string) error { return client.LPush(t.Context(), k, "x").Err() }},
		"garbage":          {"unreadable", func(k string) error { return client.Set(t.Context(), k, "garbage", time.Minute).Err() }},
		"a bare finish":    {"unreadable", func(k string) error { return client.Set(t.Context(), k, "D", time.Minute).Err() }},
		"a forged finish":  {"forged", func(k string) error { return client.Set(t.Context(), k, forgedFinish(), time.Minute).Err() }},
		"a lease for ever": {"unreadable", func(k string) error { return client.Set(t.Context(), k, "Lx", 0).Err() }},
		"oversized": {"unreadable", func(k string) error {
			return client.Set(t.Context(), k, "D"+string(make([]byte, 1<<20)), time.Minute).Err()
		}},
	} {
		t.Run(name, func(t *testing.T) {
			o := newCounts()
			box := open(t, client, prefix("forged"), observed(o), func(c *cache.Config) { c.EntryMax = 4096 })
			id := newID()
			must(t, c.spoil(guardKey("forged", id)))
			if _, known, err := box.Look(t.Context(), id); known || err != nil {
				t.Errorf("it is believed: %v", err)
			}
			take(t, box, id, "a", inbox.GuardGranted)
			if o.of(commitbox.CacheLookups, "test.cache", c.found) == 0 {
				t.Errorf("it was not counted as %s: %v", c.found, o.total)
			}
			says(t, true)(box.Finish(t.Context(), id, "a", completed("a"), time.Minute))
			take(t, box, id, "b", inbox.GuardDone)
		})
	}
	t.Run("a finish of another message", func(t *testing.T) {
		box := open(t, client, prefix("forged"))
		id, other := newID(), newID()
		take(t, box, other, "a", inbox.GuardGranted)
		says(t, true)(box.Finish(t.Context(), other, "a", completed("a"), time.Minute))
		must(t, client.Copy(t.Context(), guardKey("forged", other), guardKey("forged", id), 0, false).Err())
		take(t, box, id, "b", inbox.GuardGranted)
	})
}

func forgedFinish() []byte { return append([]byte{'D', 1, 'x', 1}, make([]byte, 100)...) }

func TestGuardRefusesBadArguments(t *testing.T) {
	t.Parallel()
	c := open(t, connect(t, testenv.Redis(t)))
	ctx, id := t.Context(), newID()
	long := string(make([]byte, 256))
	for name, call := range map[string]func() error{
		"Begin without a token":     func() error { _, _, _, err := c.Begin(ctx, id, "", time.Minute); return err },
		"Begin with a long token":   func() error { _, _, _, err := c.Begin(ctx, id, long, time.Minute); return err },
		"Begin without a lease":     func() error { _, _, _, err := c.Begin(ctx, id, "a", 0); return err },
		"Renew without a lease":     func() error { _, err := c.Renew(ctx, id, "a", 0); return err },
		"Finish without a lifetime": func() error { _, err := c.Finish(ctx, id, "a", completed("a"), 0); return err },
		"Release without a token":   func() error { _, err := c.Release(ctx, id, ""); return err },
	} {
		var bad *commitbox.InputError
		if err := call(); !errors.As(err, &bad) {
			t.Errorf("%s: %v, want an InputError", name, err)
		}
	}
}

// TestScriptsAreSentAgain forgets the scripts, as a restarted server has.
func TestScriptsAreSentAgain(t *testing.T) {
	t.Parallel()
	s := private(t)
	client := connect(t, s.URL())
	c := open(t, client)
	for range 3 {
		id := newID()
		take(t, c, id, "a", inbox.GuardGranted)
		says(t, true)(c.Finish(t.Context(), id, "a", completed("a"), time.Minute))
		must(t, client.ScriptFlush(t.Context()).Err())
	}
}
