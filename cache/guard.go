package cache

import (
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/inbox"
)

// tokenLenMax is what the scripts count on.
const tokenLenMax = 255

// begun is what begin.lua answers.
type begun struct {
	state    inbox.GuardState
	left     time.Duration
	value    []byte
	replaced bool // something unreadable was in the way
}

// Begin takes a message for a token, or says who has it. A finished entry that is not signed by us counts as nothing: the
// message is taken.
func (c *Cache) Begin(
	ctx context.Context, id inbox.ID, token string, lease time.Duration,
) (state inbox.GuardState, entry inbox.CacheEntry, left time.Duration, err error) {
	if err := checkLease(token, lease); err != nil {
		return inbox.GuardHeld, entry, 0, err
	}
	c.store.warnOfEviction(ctx)
	k := c.guardKey(id)
	type answer struct {
		begun
		entry   inbox.CacheEntry
		reading reading
	}
	a, err := do(ctx, c.store, "acquire", func(ctx context.Context) (a answer, err error) {
		a.begun, err = begin(ctx, c.store.client, k, token, lease, c.valueMax(), func(value []byte) (ok bool) {
			a.entry, a.reading = c.openDone(k, value)
			return a.reading == hit
		})
		return a, err
	})
	if err != nil {
		return inbox.GuardHeld, entry, 0, err
	}
	switch {
	case a.replaced && a.reading == "":
		a.reading = unreadable
	case a.reading == "":
		a.reading = miss
	}
	c.count(id, a.reading)
	return a.state, a.entry, a.left, nil
}

// begin runs begin.lua, a second time if what it found finished is not believed.
func begin(
	ctx context.Context, client redis.UniversalClient, key, token string, lease time.Duration, valueMax int, believe func(value []byte) bool,
) (b begun, err error) {
	refused := ""
	for range 2 {
		b, err = parseBegun(beginScript.Run(ctx, client, []string{key}, token, lease.Milliseconds(), valueMax, refused).Slice())
		if err != nil || b.state != inbox.GuardDone || believe(b.value) {
			return b, err
		}
		sum := sha1.Sum(b.value)
		refused = hex.EncodeToString(sum[:])
	}
	// Somebody writes forged entries faster than they can be replaced.
	return begun{state: inbox.GuardHeld, left: lease}, nil
}

func parseBegun(answer []any, err error) (b begun, _ error) {
	if err != nil {
		return b, err
	}
	if len(answer) == 4 {
		state, ok1 := answer[0].(int64)
		left, ok2 := answer[1].(int64)
		value, ok3 := answer[2].(string)
		replaced, ok4 := answer[3].(int64)
		if ok1 && ok2 && ok3 && ok4 {
			return begun{inbox.GuardState(state), time.Duration(left) * time.Millisecond, []byte(value), replaced == 1}, nil
		}
	}
	return b, errors.New("the script answered in an unknown form")
}

// Renew prolongs a lease from now on.
func (c *Cache) Renew(ctx context.Context, id inbox.ID, token string, lease time.Duration) (held bool, err error) {
	if err := checkLease(token, lease); err != nil {
		return false, err
	}
	return c.store.run(ctx, "renew", renewScript, c.guardKey(id), token, lease.Milliseconds())
}

// Finish keeps what a message was finished with. An entry that is too large is a *commitbox.InputError.
func (c *Cache) Finish(ctx context.Context, id inbox.ID, token string, entry inbox.CacheEntry, ttl time.Duration) (ok bool, err error) {
	if err := errors.Join(checkToken(token), refuse(ttl < time.Millisecond, "ttl", "is less than 1 ms")); err != nil {
		return false, err
	}
	k := c.guardKey(id)
	sealed, err := c.seal.seal(k, inbox.Identity{}, entry)
	if err != nil {
		return false, err
	}
	return c.store.run(ctx, "finish", finishScript, k, token, append(doneHead(token), sealed...), ttl.Milliseconds())
}

// Release gives a message back. It says false of one that it has given back before.
func (c *Cache) Release(ctx context.Context, id inbox.ID, token string) (ok bool, err error) {
	if err := checkToken(token); err != nil {
		return false, err
	}
	return c.store.run(ctx, "release", releaseScript, c.guardKey(id), token)
}

// Look returns a finished message's entry. Whether somebody holds an unfinished one is not told.
func (c *Cache) Look(ctx context.Context, id inbox.ID) (entry inbox.CacheEntry, ok bool, err error) {
	k := c.guardKey(id)
	f, err := do(ctx, c.store, "look", func(ctx context.Context) (found, error) {
		value, err := c.store.client.GetRange(ctx, k, 0, int64(c.valueMax())).Bytes()
		switch {
		case wrongType(err):
			return found{reading: unreadable}, nil
		case err != nil:
			return found{}, err
		case len(value) == 0 || value[0] == 'L':
			return found{reading: miss}, nil
		}
		entry, r := c.openDone(k, value)
		return found{entry, r}, nil
	})
	if err != nil {
		return entry, false, err
	}
	c.count(id, f.reading)
	return f.entry, f.reading == hit, nil
}

func (c *Cache) guardKey(id inbox.ID) string { return key(c.prefix, "guard", id.Key()) }

// valueMax is the length of the longest value of a guard's key.
func (c *Cache) valueMax() int { return 2 + tokenLenMax + c.seal.entryMax }

// doneHead is what stands before the entry in a finished value.
func doneHead(token string) []byte { return append([]byte{'D', byte(len(token))}, token...) }

// openDone reads a finished value.
func (c *Cache) openDone(key string, value []byte) (inbox.CacheEntry, reading) {
	if len(value) < 2 || value[0] != 'D' || len(value) < 2+int(value[1]) {
		return inbox.CacheEntry{}, unreadable
	}
	return c.seal.open(key, inbox.Identity{}, bytes.Clone(value[2+int(value[1]):]))
}

func checkToken(token string) error {
	return refuse(len(token) < 1 || len(token) > tokenLenMax, "token", fmt.Sprintf("must have 1 to %d bytes", tokenLenMax))
}

func checkLease(token string, lease time.Duration) error {
	return errors.Join(checkToken(token), refuse(lease < time.Millisecond, "lease", "is less than 1 ms"))
}

// run runs a script that answers 1 or 0.
func (s *store) run(ctx context.Context, operation string, script *redis.Script, key string, args ...any) (bool, error) {
	n, err := do(ctx, s, operation, func(ctx context.Context) (int64, error) {
		return script.Run(ctx, s.client, []string{key}, args...).Int64()
	})
	return n == 1, err
}
