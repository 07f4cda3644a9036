package inbox

import (
	"context"
	"time"
)

// Identity names one history of a database. After a restore, a promotion or a rotation it is another one, and what was
// cached under the former is not an answer any more.
type Identity struct {
	System     uint64 // the server's system identifier
	Timeline   uint32
	Generation int64 // commitbox's own count, raised by a rotation
}

// CacheEntry is a copy of a completed row.
type CacheEntry struct {
	Fingerprint []byte // as it stands in the row; nil if there is none
	FinishedAt  time.Time
	Result      []byte // the stored form: a codec byte and the value; nil if there is none
}

// Cache keeps copies of completed rows in front of the table. Package cache implements it over Redis. What it answers is
// one of three: the copy, that it has none, or an error, which means that it could not be asked; the table decides then.
// All methods are safe for concurrent use and return within the cache's own time budget. Not promised: that a copy is
// kept as long as asked.
type Cache interface {
	Get(ctx context.Context, of Identity, id ID) (entry CacheEntry, found bool, err error)
	// Put keeps a copy for the time that the row has left. Nobody who has a message handled waits for it.
	Put(ctx context.Context, of Identity, id ID, entry CacheEntry, ttl time.Duration) error
}

// laterCache is a Cache that needs no goroutine to keep a copy behind the caller's back: done is called once it is kept or given
// up. It does not keep the slices of the entry.
type laterCache interface {
	PutLater(of Identity, id ID, entry CacheEntry, ttl time.Duration, done func())
}

// GuardState is what a [Guard] knows of a message.
type GuardState uint8

const (
	GuardGranted GuardState = iota // the caller's token holds the message now
	GuardHeld                      // another token holds it
	GuardDone                      // it was finished; the entry says with what
)

// Guard is the store of mode cache (weak): tokens with a lease instead of rows. Package cache implements it over Redis.
// Not promised: more than its store keeps: what that forgets may run again.
type Guard interface {
	// Begin takes the message for a token. The same token gets it again. left is how long another token's lease lasts.
	Begin(ctx context.Context, id ID, token string, lease time.Duration) (state GuardState, entry CacheEntry, left time.Duration, err error)
	// Renew reports whether the token still holds the message.
	Renew(ctx context.Context, id ID, token string, lease time.Duration) (held bool, err error)
	// Finish replaces the token by the entry for ttl, and reports whether it is there: false says that another token holds
	// or has finished the message. A token that was lost meanwhile, to nobody, is no obstacle.
	Finish(ctx context.Context, id ID, token string, entry CacheEntry, ttl time.Duration) (ok bool, err error)
	// Release gives the message back, and reports whether the token held it.
	Release(ctx context.Context, id ID, token string) (ok bool, err error)
	// Look returns a finished message's entry and changes nothing.
	Look(ctx context.Context, id ID) (entry CacheEntry, found bool, err error)
}
