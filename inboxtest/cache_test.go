package inboxtest

import (
	"context"
	"testing"
	"time"

	"github.com/commitbox/commitbox/inbox"
)

// careless is a cache and a guard that keeps one entry for all and lets everybody do anything.
type careless struct{ entry *inbox.CacheEntry }

func (c *careless) Get(context.Context, inbox.Identity, inbox.ID) (inbox.CacheEntry, bool, error) {
	if c.entry == nil {
		return inbox.CacheEntry{}, false, nil
	}
	return *c.entry, true, nil
}

func (c *careless) Put(_ context.Context, _ inbox.Identity, _ inbox.ID, e inbox.CacheEntry, _ time.Duration) error {
	e.Result = append(e.Result, 'x')
	c.entry = &e
	return nil
}

func (*careless) Begin(context.Context, inbox.ID, string, time.Duration) (inbox.GuardState, inbox.CacheEntry, time.Duration, error) {
	return inbox.GuardGranted, inbox.CacheEntry{}, 0, nil
}

func (*careless) Renew(context.Context, inbox.ID, string, time.Duration) (bool, error) {
	return true, nil
}

func (*careless) Finish(context.Context, inbox.ID, string, inbox.CacheEntry, time.Duration) (bool, error) {
	return true, nil
}

func (*careless) Release(context.Context, inbox.ID, string) (bool, error) { return true, nil }

func (*careless) Look(context.Context, inbox.ID) (inbox.CacheEntry, bool, error) {
	return inbox.CacheEntry{}, false, nil
}

// TestCarelessStoresAreSeen shows that each demand on a cache and on a guard can fail.
func TestCarelessStoresAreSeen(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	for _, c := range cacheChecks {
		if c.run(ctx, &careless{}, newID()) == nil {
			t.Errorf("%s: not noticed", c.name)
		}
	}
	for _, c := range guardChecks {
		if c.run(ctx, &careless{}, newID()) == nil {
			t.Errorf("%s: not noticed", c.name)
		}
	}
}
