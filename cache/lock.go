package cache

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
)

var (
	// ErrLocked says that another holder had the lock for the whole wait.
	ErrLocked = errors.New("cache: another holder has the lock")
	// ErrLockLost says that the lock is not held any more, or that this cannot be known: its lease ended without a renewal.
	ErrLockLost = errors.New("cache: the lock is lost")
)

// LockConfig sets up a [Locker]. The zero value is usable.
type LockConfig struct {
	Prefix string // as in Config

	// Lease is how long a lock outlives a holder that died. Default 10 s, at least 100 ms. It is renewed after a third.
	Lease time.Duration
	// Wait is how long Acquire waits for a lock that another has. Default 0: not at all.
	Wait time.Duration
	// Timeout is the time budget of one call to Redis. Default 100 ms; at most a fifth of the lease.
	Timeout time.Duration

	Observer commitbox.Observer // default: none
	Logger   *slog.Logger       // default: slog.Default()
}

func (c LockConfig) withDefaults() LockConfig {
	c.Prefix = cmp.Or(c.Prefix, defaultPrefix)
	c.Lease = cmp.Or(c.Lease, 10*time.Second)
	c.Timeout = cmp.Or(c.Timeout, min(100*time.Millisecond, c.Lease/5))
	c.Observer = cmp.Or(c.Observer, commitbox.Discard)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

func (c LockConfig) check(client redis.UniversalClient) error {
	return errors.Join(
		refuse(client == nil, "client", "is nil"),
		refuse(!prefixForm.MatchString(c.Prefix), "LockConfig.Prefix", prefixRule),
		refuse(c.Lease < 100*time.Millisecond, "LockConfig.Lease", "is less than 100 ms"),
		refuse(c.Wait < 0, "LockConfig.Wait", "is negative"),
		refuse(c.Timeout < time.Millisecond || c.Timeout > c.Lease/5, "LockConfig.Timeout", "must be 1 ms to a fifth of the Lease"),
	)
}

// Locker hands out locks in Redis. Its methods are safe for concurrent use.
//
// A lock keeps work from being done twice at the same time most of the time: it sheds load. It does not make the work
// correct. Redis may evict it, lose it in a failover, or give it to another while its holder stands still, and nothing in
// Redis can stop a holder that does not know this yet. What must happen once is decided by a row, in the transaction of
// the work.
type Locker struct {
	cfg   LockConfig
	store *store
}

// NewLocker returns a locker over a client of any kind, of which [New] says how to set it up.
func NewLocker(client redis.UniversalClient, c LockConfig) (*Locker, error) {
	c = c.withDefaults()
	if err := c.check(client); err != nil {
		return nil, err
	}
	b := &breaker{failuresMax: defaultFailuresMax, pause: defaultOpenFor}
	return &Locker{cfg: c, store: newStore("lock", client, c.Timeout, b, c.Observer, c.Logger)}, nil
}

// Acquire takes the lock of a name, 1 to 512 bytes of any text. The error is ErrLocked if another has it, also after
// LockConfig.Wait, and ErrUnavailable if Redis cannot be asked; a lock that was then granted all the same is given back
// if that can be done, and ends with its lease otherwise. Every lock must be released.
func (l *Locker) Acquire(ctx context.Context, name string) (*Lock, error) {
	if err := refuse(name == "" || len(name) > lockNameMax, "name", "must have 1 to 512 bytes"); err != nil {
		return nil, err
	}
	l.store.warnOfEviction(ctx)
	k := key(l.cfg.Prefix, "lock", inbox.ID{Message: name}.Key())
	token := rand.Text()
	deadline := time.Now().Add(l.cfg.Wait)
	for pause := lockPauseMin; ; pause = min(2*pause, lockPauseMax) {
		asked := time.Now()
		b, err := l.take(ctx, k, token)
		switch {
		case err != nil:
			start(ctx, l.store, "unlock", func(ctx context.Context) (int64, error) { // it may have been granted; nobody waits
				return releaseScript.Run(ctx, l.store.client, []string{k}, token).Int64()
			})
			return nil, err
		case b.state == inbox.GuardGranted:
			return l.hold(ctx, k, name, token, asked), nil
		}
		rest := time.Until(deadline)
		if rest <= 0 {
			return nil, fmt.Errorf("%w: %q, for another %v at least", ErrLocked, name, b.left)
		}
		if err := sleep(ctx, min(rest, jitter(pause), max(b.left, time.Millisecond))); err != nil {
			return nil, err
		}
	}
}

const (
	lockNameMax  = 512
	lockPauseMin = 10 * time.Millisecond
	lockPauseMax = 200 * time.Millisecond
)

func (l *Locker) take(ctx context.Context, k, token string) (begun, error) {
	return do(ctx, l.store, "lock", func(ctx context.Context) (begun, error) {
		// A lock is never finished: a value that says so is none of ours.
		return begin(ctx, l.store.client, k, token, l.cfg.Lease, 1+tokenLenMax, func([]byte) bool { return false })
	})
}

// jitter keeps those who wait for one lock from asking at the same moment.
func jitter(d time.Duration) time.Duration { return d/2 + mathrand.N(d) }

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Lock is a lock that was acquired. Its methods are safe for concurrent use.
type Lock struct {
	locker     *Locker
	key, name  string
	token      string
	ctx        context.Context
	cancel     context.CancelCauseFunc
	stop, done chan struct{} // of the renewal
	release    func() error
}

// hold starts the renewal of a lock that was asked for at a time.
func (l *Locker) hold(ctx context.Context, key, name, token string, asked time.Time) *Lock {
	k := &Lock{locker: l, key: key, name: name, token: token, stop: make(chan struct{}), done: make(chan struct{})}
	k.ctx, k.cancel = context.WithCancelCause(ctx)
	k.release = sync.OnceValue(k.giveBack)
	go k.keep(asked)
	return k
}

// Context ends when the lock is lost, with an error that matches ErrLockLost as its cause, and when the context of Acquire
// ends or Release is called. The work under the lock runs with it.
func (k *Lock) Context() context.Context { return k.ctx }

// Token is the random value that marks this holder in Redis.
func (k *Lock) Token() string { return k.token }

// Release ends the renewal and gives the lock back, unless another holds it by now: then, and if the lease had ended,
// the error is ErrLockLost. It takes at most twice LockConfig.Timeout, and works after the context of Acquire has ended.
// With ErrUnavailable the lock ends with its lease. Further calls return what the first one did.
func (k *Lock) Release() error { return k.release() }

func (k *Lock) giveBack() error {
	close(k.stop)
	<-k.done
	defer k.cancel(context.Canceled)
	held, err := k.locker.store.run(context.WithoutCancel(k.ctx), "unlock", releaseScript, k.key, k.token)
	if err == nil && !held {
		return fmt.Errorf("%w: %q was not ours when it was released", ErrLockLost, k.name)
	}
	return err
}

// keep renews the lock until it is released, its context ends or it is lost. It is given up as lost a while before the
// lease ends, because this clock and that of Redis do not run at the same rate.
func (k *Lock) keep(asked time.Time) {
	defer close(k.done)
	lease := k.locker.cfg.Lease
	safe := lease - lease/10
	until := asked.Add(safe)
	next := lease / 3
	for {
		if !k.pause(min(next, time.Until(until))) {
			return
		}
		now := time.Now()
		if !now.Before(until) {
			k.lose(errors.New("its lease ran out"))
			return
		}
		held, err := k.locker.store.run(k.ctx, "relock", renewScript, k.key, k.token, lease.Milliseconds())
		switch {
		case k.ctx.Err() != nil:
			return
		case held:
			until, next = now.Add(safe), lease/3
		case err == nil:
			k.lose(errors.New("redis does not know it any more"))
			return
		default: // redis cannot be asked, the lease still lasts
			next = lease / 20
		}
	}
}

// pause reports whether the renewal goes on after it.
func (k *Lock) pause(d time.Duration) bool {
	timer := time.NewTimer(max(d, 0))
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-k.stop:
	case <-k.ctx.Done():
	}
	return false
}

func (k *Lock) lose(why error) {
	k.locker.cfg.Logger.Warn("cache: lock is lost", "name", k.name, "error", why)
	k.cancel(fmt.Errorf("%w: %q: %w", ErrLockLost, k.name, why))
}
