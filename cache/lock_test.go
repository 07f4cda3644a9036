package cache_test

import (
	"context"
	"crypto/rand"
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/internal/testenv"
)

func newLocker(t testing.TB, client redis.UniversalClient, cfg cache.LockConfig) *cache.Locker {
	t.Helper()
	cfg.Logger = quiet
	l, err := cache.NewLocker(client, cfg)
	must(t, err)
	return l
}

func acquire(t testing.TB, l *cache.Locker, name string) *cache.Lock {
	t.Helper()
	slowBefore := false // a busy machine may be too slow for the budget, and the lock granted all the same
	for deadline := time.Now().Add(30 * time.Second); ; {
		lock, err := l.Acquire(context.Background(), name)
		if err == nil {
			return lock
		}
		if slow := errors.Is(err, cache.ErrUnavailable) || slowBefore; !slow || time.Now().After(deadline) {
			t.Fatal(err)
		}
		slowBefore = true
		time.Sleep(10 * time.Millisecond)
	}
}

func lockKey(name string) string { return "commitbox:lock:{|" + name + "}" }

// TestA7_OneHolderAtATime lets many do work under one lock.
func TestA7_OneHolderAtATime(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	l := newLocker(t, client, cache.LockConfig{Wait: time.Minute, Timeout: 2 * time.Second})
	name := rand.Text()
	var inside, runs atomic.Int32
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			lock, err := l.Acquire(context.Background(), name)
			if err != nil {
				t.Error(err)
				return
			}
			if inside.Add(1) != 1 {
				t.Error("two hold the lock")
			}
			runs.Add(1)
			time.Sleep(5 * time.Millisecond)
			inside.Add(-1)
			if err := lock.Release(); err != nil {
				t.Error(err)
			}
			if lock.Release() != nil || lock.Context().Err() == nil {
				t.Error("a released lock is not released")
			}
		})
	}
	all.Wait()
	if runs.Load() != 8 {
		t.Errorf("%d of 8 got the lock", runs.Load())
	}
	if n := client.Exists(t.Context(), lockKey(name)).Val(); n != 0 {
		t.Error("the last one left its key")
	}
}

func TestA7_ALockOfAnotherIsRefusedInTime(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	name := rand.Text()
	lock := acquire(t, newLocker(t, client, cache.LockConfig{Timeout: 2 * time.Second}), name)
	defer lock.Release()
	if got := client.Get(t.Context(), lockKey(name)).Val(); got != "L"+lock.Token() {
		t.Errorf("redis has %q, the token is %q", got, lock.Token())
	}
	for _, wait := range []time.Duration{0, 100 * time.Millisecond} {
		began := time.Now()
		_, err := newLocker(t, client, cache.LockConfig{Wait: wait, Timeout: 2 * time.Second}).Acquire(t.Context(), name)
		if took := time.Since(began); !errors.Is(err, cache.ErrLocked) || took < wait || took > wait+5*time.Second {
			t.Errorf("wait %v: %v after %v", wait, err, took)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := newLocker(t, client, cache.LockConfig{Wait: time.Hour, Timeout: 2 * time.Second}).Acquire(ctx, name); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a wait that was cancelled ends with %v", err)
	}
}

// TestA7_ALockIsRenewed holds a lock for several leases.
func TestA7_ALockIsRenewed(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	l := newLocker(t, client, cache.LockConfig{Lease: time.Second})
	name := rand.Text()
	lock := acquire(t, l, name)
	for end := time.Now().Add(2500 * time.Millisecond); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		if got := client.Get(t.Context(), lockKey(name)).Val(); got != "L"+lock.Token() || lock.Context().Err() != nil {
			t.Fatalf("redis has %q: %v", got, context.Cause(lock.Context()))
		}
	}
	must(t, lock.Release())
}

// TestB43_ALostLockIsNoticedAndLeftAlone gives the lock to another while its holder believes in it.
func TestB43_ALostLockIsNoticedAndLeftAlone(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	name := rand.Text()
	a := acquire(t, newLocker(t, client, cache.LockConfig{Lease: time.Second}), name)
	must(t, client.Del(t.Context(), lockKey(name)).Err()) // as if its lease had ended
	b := acquire(t, newLocker(t, client, cache.LockConfig{Lease: time.Minute}), name)
	select {
	case <-a.Context().Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the holder was not told")
	}
	if err := context.Cause(a.Context()); !errors.Is(err, cache.ErrLockLost) {
		t.Errorf("the cause is %v", err)
	}
	if err := a.Release(); !errors.Is(err, cache.ErrLockLost) {
		t.Errorf("Release says %v", err)
	}
	if got := client.Get(t.Context(), lockKey(name)).Val(); got != "L"+b.Token() {
		t.Errorf("redis has %q, not the second holder", got)
	}
	if left := client.PTTL(t.Context(), lockKey(name)).Val(); left < 30*time.Second {
		t.Errorf("the second holder's lease became %v", left)
	}
	must(t, b.Release())
}

// TestB43_ALeaseThatCannotBeRenewedIsLost freezes Redis under a holder: it is told before another may hold the lock.
func TestB43_ALeaseThatCannotBeRenewedIsLost(t *testing.T) {
	t.Parallel()
	s := private(t)
	const lease = time.Second
	l := newLocker(t, connect(t, s.URL()), cache.LockConfig{Lease: lease})
	began := time.Now()
	lock := acquire(t, l, "frozen")
	must(t, s.Pause())
	select {
	case <-lock.Context().Done():
	case <-time.After(20 * time.Second):
		t.Fatal("the holder was not told")
	}
	if err := context.Cause(lock.Context()); !errors.Is(err, cache.ErrLockLost) || time.Since(began) < lease/2 {
		t.Errorf("the cause is %v after %v", err, time.Since(began))
	}
	wantUnavailable(t, lock.Release())
	must(t, s.Resume())
}

// TestACancelledAcquireLeavesNoLock cancels a caller whose request is on its way.
func TestACancelledAcquireLeavesNoLock(t *testing.T) {
	t.Parallel()
	s := private(t)
	proxy := testenv.NewProxy(t, s.URL())
	client := connect(t, s.URL())
	l := newLocker(t, connect(t, proxy.URL(t, s.URL())), cache.LockConfig{Lease: time.Minute, Timeout: 10 * time.Second})
	must(t, acquire(t, l, "warm").Release())
	proxy.Latency(100 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := l.Acquire(ctx, "cancelled"); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Acquire says %v", err)
	}
	eventually(t, func() error {
		if calls(t, client, "del") < 2 {
			return errors.New("it was not given back")
		}
		return nil
	})
	if n := client.Exists(t.Context(), lockKey("cancelled")).Val(); n != 0 {
		t.Error("a lock that nobody has is held")
	}
}

// TestALockEndsWithItsContext forgets to release: the renewal ends with the context, the lock with its lease.
func TestALockEndsWithItsContext(t *testing.T) {
	t.Parallel()
	client := connect(t, testenv.Redis(t))
	l := newLocker(t, client, cache.LockConfig{Lease: 200 * time.Millisecond, Timeout: 40 * time.Millisecond})
	ctx, cancel := context.WithCancel(t.Context())
	var lock *cache.Lock
	name := rand.Text()
	eventually(t, func() (err error) { lock, err = l.Acquire(ctx, name); return err })
	cancel()
	if err := context.Cause(lock.Context()); !errors.Is(err, context.Canceled) {
		t.Errorf("the cause is %v", err)
	}
	eventually(t, func() error {
		if n := client.Exists(t.Context(), lockKey(name)).Val(); n != 0 {
			return errors.New("it is still held")
		}
		return nil
	})
}

func TestLockConfigNamesEveryBadField(t *testing.T) {
	t.Parallel()
	_, err := cache.NewLocker(nil, cache.LockConfig{Prefix: " ", Lease: time.Millisecond, Wait: -1, Timeout: -1})
	for _, field := range []string{"client", "Prefix", "Lease", "Wait", "Timeout"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not named by %v", field, err)
		}
	}
	l := newLocker(t, connect(t, testenv.Redis(t)), cache.LockConfig{})
	for _, name := range []string{"", strings.Repeat("x", 513)} {
		if _, err := l.Acquire(t.Context(), name); err == nil {
			t.Errorf("a name of %d bytes was taken", len(name))
		}
	}
}
