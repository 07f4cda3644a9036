package cache

import (
	"context"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
)

// Cache keeps what the inbox knows in Redis. It is an [inbox.Cache], copies in front of the table, and an [inbox.Guard], the
// store of mode cache. Its methods are safe for concurrent use and return within Config.Timeout, or when their ctx ends if
// that is earlier. It needs no closing; closing the client ends what is still on its way.
type Cache struct {
	store  *store
	seal   sealer
	prefix string

	mu      sync.Mutex
	flights map[flight]*call[found]
}

var (
	_ inbox.Cache = (*Cache)(nil)
	_ inbox.Guard = (*Cache)(nil)
)

// flight names a look-up that others may join.
type flight struct {
	of  inbox.Identity
	key string
}

// found is what a look-up has come back with.
type found struct {
	entry   inbox.CacheEntry
	reading reading
}

// New returns a cache over a client of any kind: single, Sentinel or Cluster. Set the client's ContextTimeoutEnabled;
// otherwise a call that Redis leaves without an answer keeps its connection for the client's ReadTimeout, though the caller
// does not wait for it. Set its MaxRetries to -1; otherwise a write that a server refuses which only reads is repeated until
// the budget is used up, and taken for a server that is away. go-redis writes failed dials to its own logger, which
// redis.SetLogger replaces.
func New(client redis.UniversalClient, c Config) (*Cache, error) {
	c = c.withDefaults()
	if err := c.check(client); err != nil {
		return nil, err
	}
	return &Cache{
		store:   newStore("cache", client, c.Timeout, &breaker{failuresMax: c.FailuresMax, pause: c.OpenFor}, c.Observer, c.Logger),
		seal:    newSealer(c.Secrets, c.EntryMax),
		prefix:  c.Prefix,
		flights: make(map[flight]*call[found]),
	}, nil
}

// key is where Redis keeps something: the kind of it and its name, which is the hash tag.
func key(prefix, kind, name string) string { return prefix + ":" + kind + ":{" + name + "}" }

// Get looks for a copy of a completed row. What is no such copy (another type, garbage, a copy of another key or of another
// history of the database, a wrong signature, too large) is a miss, and counted by what it is. Callers that ask for the same
// id at the same time share one call to Redis, and the slices of its answer, which they must not change.
func (c *Cache) Get(ctx context.Context, of inbox.Identity, id inbox.ID) (entry inbox.CacheEntry, ok bool, err error) {
	if err := ctx.Err(); err != nil {
		return entry, false, err
	}
	f, err := c.lookUp(flight{of, key(c.prefix, "entry", id.Key())}).wait(ctx)
	if err != nil {
		return entry, false, err
	}
	c.count(id, f.reading)
	return f.entry, f.reading == hit, nil
}

// lookUp joins the look-up that is on its way, or starts one. It belongs to none of those who wait for it. It asks for one
// byte more than an entry may have, and never for more.
func (c *Cache) lookUp(f flight) *call[found] {
	c.mu.Lock()
	defer c.mu.Unlock()
	if joined := c.flights[f]; joined != nil && !joined.settled() {
		return joined
	}
	answer := redis.NewStringCmd(context.Background(), "getrange", f.key, 0, c.seal.entryMax)
	var own *call[found]
	own = send(c.store, c.store.reads, "get", answer, len(f.key), func(err error) (found, error) {
		c.mu.Lock()
		if c.flights[f] == own { // another may have taken the place of one that was given up
			delete(c.flights, f)
		}
		c.mu.Unlock()
		return c.read(f, answer, err)
	})
	if !own.settled() {
		c.flights[f] = own
	}
	return own
}

// read makes out what the answer is.
func (c *Cache) read(f flight, answer *redis.StringCmd, err error) (found, error) {
	switch {
	case wrongType(err):
		return found{reading: unreadable}, nil
	case err != nil:
		return found{}, err
	}
	stored, err := answer.Bytes()
	if err != nil || len(stored) == 0 {
		return found{reading: miss}, err
	}
	entry, r := c.seal.open(f.key, f.of, stored)
	return found{entry, r}, nil
}

// count reports what a look-up found.
func (c *Cache) count(id inbox.ID, r reading) {
	c.store.observer.Observe(commitbox.CacheLookups, 1, id.Consumer, string(r))
	if r == forged || r == unreadable || r == oversized {
		c.store.warn("cache: redis holds something that is no entry of ours, it is ignored", "consumer", id.Consumer, "message_id", id.Message, "found", string(r))
	}
}

// Put keeps a copy of a completed row for ttl. With a ttl below a millisecond, and for an entry that is larger than
// Config.EntryMax, it keeps nothing and returns nil.
func (c *Cache) Put(ctx context.Context, of inbox.Identity, id inbox.ID, entry inbox.CacheEntry, ttl time.Duration) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	put := c.put(of, id, entry, ttl)
	if put == nil {
		return nil
	}
	_, err := put.wait(ctx)
	return err
}

// PutLater is Put for a caller who goes on at once: done is called when the copy is kept or given up. It does not keep the
// slices of the entry.
func (c *Cache) PutLater(of inbox.Identity, id inbox.ID, entry inbox.CacheEntry, ttl time.Duration, done func()) {
	put := c.put(of, id, entry, ttl)
	if put == nil {
		done()
		return
	}
	put.then(done)
}

// put sends a copy; nil if there is nothing to keep.
func (c *Cache) put(of inbox.Identity, id inbox.ID, entry inbox.CacheEntry, ttl time.Duration) *call[struct{}] {
	if ttl < time.Millisecond {
		return nil
	}
	k := key(c.prefix, "entry", id.Key())
	stored, err := c.seal.seal(k, of, entry)
	if err != nil { // the table has the row; a copy that is too large is only slower
		c.store.observer.Observe(commitbox.CacheErrors, 1, "put", string(tooLarge))
		return nil
	}
	set := redis.NewStatusCmd(context.Background(), "set", k, stored, "px", ttl.Milliseconds())
	return send(c.store, c.store.writes, "put", set, len(k)+len(stored), func(err error) (struct{}, error) { return struct{}{}, err })
}
