package cache_test

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/cache"
)

// The client that package cache wants: it keeps deadlines, and leaves retries to the caller.
func ExampleNew() {
	client := redis.NewUniversalClient(&redis.UniversalOptions{
		Addrs:                 []string{"redis:6379"}, // several: a cluster; with MasterName: Sentinels
		ContextTimeoutEnabled: true,
		MaxRetries:            -1,
	})
	defer client.Close()

	secret := []byte("32 random bytes from your secrets")
	front, err := cache.New(client, cache.Config{Secrets: [][]byte{secret}})
	if err != nil {
		panic(err)
	}
	_ = front // an inbox.Cache and an inbox.Guard
}

// Only one process at a time builds the report; another one that comes meanwhile does without.
func ExampleLocker_Acquire() {
	build := func(ctx context.Context, locker *cache.Locker) error {
		lock, err := locker.Acquire(ctx, "daily report")
		switch {
		case errors.Is(err, cache.ErrLocked):
			return nil // somebody is at it
		case errors.Is(err, cache.ErrUnavailable):
			// Build it all the same: the lock spares work, it does not make it right.
			return buildReport(ctx)
		case err != nil:
			return err
		}
		defer lock.Release()
		return buildReport(lock.Context())
	}
	_ = build
}

func buildReport(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(time.Millisecond):
		return nil
	}
}
