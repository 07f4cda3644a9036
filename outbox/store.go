package outbox

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"
)

// shards is the number of shards of a channel. It is fixed by the schema.
const shards = 64

// store is what a relay asks of the database, one channel of it. The protocol lives in the relay, the atomic steps here.
// Every method is one transaction; after an error it is not known whether it took place.
type store interface {
	// join makes the relay a member of the channel, with no shards yet.
	join(ctx context.Context, owner uuid.UUID) error
	// claim removes relays whose lease has ended and takes free shards, up to the relay's fair share.
	claim(ctx context.Context, owner uuid.UUID) error
	// release gives shards back.
	release(ctx context.Context, owner uuid.UUID, given []holding) error
	// renew prolongs the lease; false: it has ended and this owner is no more.
	renew(ctx context.Context, owner uuid.UUID) (bool, error)
	// leave gives everything back and ends the membership.
	leave(ctx context.Context, owner uuid.UUID) error
	// sentDays makes the days in which messages are kept, and drops those that are not kept any more.
	sentDays(ctx context.Context) error
	// connect opens a connection of its own for a lane or the gate.
	connect(ctx context.Context) (link, error)
}

// link is one connection. It is used by one goroutine; after an error it is closed and a new one is made.
type link interface {
	// position is the last position that was drawn.
	position(ctx context.Context) (int64, error)
	// writers lists the transactions that may still commit a message; to be asked after position.
	writers(ctx context.Context) ([]writer, error)
	// serverStart changes when the server was restarted or replaced.
	serverStart(ctx context.Context) (time.Time, error)
	// look tells what the relay holds and who else is there.
	look(ctx context.Context, owner uuid.UUID) (surroundings, error)

	// poll reads messages above the floors, in order of shard and position. The rows are the link's again when it polls next.
	poll(ctx context.Context, from []cursor, bytes int64) ([]row, error)
	// blocked lists the blocked keys of shards.
	blocked(ctx context.Context, shards []int16) ([]keyRef, error)
	// due reads the first messages of blocked keys whose time has come, and due messages without a key.
	due(ctx context.Context, shards []int16, keys, perKey int, bytes int64) ([]row, error)
	// read reads messages from wherever they wait.
	read(ctx context.Context, at []ref) ([]row, error)
	// drained lists due keys that have no message left.
	drained(ctx context.Context, shards []int16, keys int) ([]keyRef, error)
	// nextDue is the time until the next deferred message is due; false if there is none.
	nextDue(ctx context.Context, shards []int16) (time.Duration, bool, error)

	// confirm removes messages that the broker has confirmed, wherever they are now, and keeps them among the sent ones if
	// that is asked. It is not fenced.
	confirm(ctx context.Context, confirmed []found, keep bool) error
	// moveScheduled gives due messages their place in hot, and tells how many, and when the next is due.
	moveScheduled(ctx context.Context, atMost int) (moved int, nextIn time.Duration, err error)
	// settle removes messages as confirm does, and moves followers, in the shards that are still held under the epochs given,
	// behind what failed before them. It tells which shards are not held.
	settle(ctx context.Context, owner uuid.UUID, epochs map[int16]int64, confirmed []found, keep bool, followers []found) (lost []int16, err error)
	// apply makes a change of state in the shards that are still held under the epochs given, and tells which are not.
	apply(ctx context.Context, owner uuid.UUID, epochs map[int16]int64, c change) (outcome, error)

	close()
}

// holding is a shard that a relay owns, and the token that proves it.
type holding struct {
	shard int16
	epoch int64
}

// surroundings is what a relay sees of its channel.
type surroundings struct {
	held    []holding       // in order
	unclean map[int16]probe // held shards taken over from a relay that died, with what it noted last
	members int             // relays, expired ones too
	rank    int             // this one's place among them, from 0
	expired bool            // the lease of one has ended
	free    int             // shards that nobody owns
	hold    bool            // a dead message holds its key
	keep    bool            // confirmed messages are kept
}

// probe is the note of a relay that is about to publish a message of a shard on probation. id 0: no note.
type probe struct {
	shard int16
	id    int64
	alone bool // in a call of its own
}

// writer is an open transaction that has touched the message table. pid is 0 if it has no session.
type writer struct {
	id  string
	pid int32
}

// cursor says from where and how many messages to read from a shard.
type cursor struct {
	shard int16
	floor int64
	limit int32
}

// ref names a message by its place.
type ref struct {
	shard    int16
	id       int64
	deferred bool // it was read from the deferred messages
}

// origin names the message wherever it was read from.
func (r ref) origin() ref { return ref{shard: r.shard, id: r.id} }

// found is a message where it was read. Its id is compared too: after a failover a position may have been drawn again, for
// another message.
type found struct {
	ref
	message uuid.UUID
	place   pgtype.TID // of a message that was read from hot
}

// keyRef names a key of the channel.
type keyRef struct {
	shard int16
	key   string
}

// row is a message as it was read.
type row struct {
	Record
	ref
	place  pgtype.TID // where it lies in PostgreSQL's table
	bad    error      // why it cannot be handed to a publisher
	deadly bool       // a relay died while it published this message alone
}

func (r *row) keyRef() keyRef { return keyRef{r.shard, r.Key} }

// change is a change of state of one or more shards. It happens as a whole or not at all, but for shards that are lost.
// A message and a key stand in it once.
type change struct {
	deferred []failure // fail, and leave hot for deferred
	failed   []failure // fail again in deferred
	buried   []failure // become dead
	block    []blocked // keys that wait until a time
	hold     []held    // keys that wait for an operator
	unblock  []keyRef  // keys that may flow if nothing is left behind them
	probes   []probe   // messages that are about to be tried, of shards on probation
	clean    []int16   // shards whose probation has ended
}

type failure struct {
	ref
	attempts int // after it; for one that fails again in deferred: 0 if nothing is spent by it
	text     string
	delay    time.Duration
}

type blocked struct {
	keyRef
	delay time.Duration
}

func (c *change) empty() bool {
	return len(c.deferred)+len(c.failed)+len(c.buried)+len(c.block)+len(c.hold)+len(c.unblock)+len(c.probes)+len(c.clean) == 0
}

// held is a key that a dead message holds.
type held struct {
	keyRef
	id int64
}

// outcome is what became of a change.
type outcome struct {
	lost []int16  // shards that are not held any more: nothing was changed in them
	free []keyRef // keys that flow again
}

// shards lists the shards that the change touches, in order.
func (c *change) shards() []int16 {
	seen := make(map[int16]bool)
	c.each(func(shard int16) bool { seen[shard] = true; return true })
	return slices.Sorted(maps.Keys(seen))
}

// without returns the change less what concerns the given shards.
func (c *change) without(lost []int16) change {
	rest := *c
	rest.each(func(shard int16) bool { return !slices.Contains(lost, shard) })
	return rest
}

// each calls keep with the shard of every entry, and drops the entries for which it says no.
func (c *change) each(keep func(shard int16) bool) {
	filter(&c.deferred, func(f failure) bool { return keep(f.shard) })
	filter(&c.failed, func(f failure) bool { return keep(f.shard) })
	filter(&c.buried, func(f failure) bool { return keep(f.shard) })
	filter(&c.block, func(b blocked) bool { return keep(b.shard) })
	filter(&c.hold, func(h held) bool { return keep(h.shard) })
	filter(&c.unblock, func(k keyRef) bool { return keep(k.shard) })
	filter(&c.probes, func(p probe) bool { return keep(p.shard) })
	filter(&c.clean, keep)
}

func filter[T any](list *[]T, keep func(T) bool) {
	var kept []T
	for _, e := range *list {
		if keep(e) {
			kept = append(kept, e)
		}
	}
	*list = kept
}
