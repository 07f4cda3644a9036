package outbox

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/ownpool"
	"github.com/commitbox/commitbox/internal/schema"
)

// postgres is the store in PostgreSQL.
type postgres struct {
	channel string
	lease   float64 // seconds
	schema  schema.Name
	pool    *pgxpool.Pool
}

// openPostgres opens the relay's own connections. Statements are described once and planned for every call: a generic
// plan that was made while the table was empty would stay. This works through a transaction pooler too.
func openPostgres(ctx context.Context, pool *pgxpool.Pool, cfg RelayConfig) (store, func(), error) {
	name, err := schema.Parse(cfg.Schema)
	if err != nil {
		return nil, nil, fmt.Errorf("outbox: %w", err)
	}
	const others = 5 // gate, heartbeat, roster, changes of membership, clock
	own, err := ownpool.Open(ctx, pool, int32(cfg.Lanes)+others, pgx.QueryExecModeCacheDescribe)
	if err != nil {
		return nil, nil, fmt.Errorf("outbox: open the relay's connections: %w", err)
	}
	return &postgres{cfg.Channel, cfg.Lease.Seconds(), name, own}, own.Close, nil
}

func pgID(u uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: u, Valid: true} }

var readCommitted = pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite}

// join: the channel's rows first, each alone; then, under the lock on the channel, the lease row.
func (p *postgres) join(ctx context.Context, owner uuid.UUID) error {
	q := db.New(p.schema.On(p.pool))
	if err := q.RegisterChannel(ctx, p.channel); err != nil {
		return err
	}
	if err := q.RegisterShards(ctx, p.channel); err != nil {
		return err
	}
	return p.membership(ctx, func(q *db.Queries) error {
		return q.JoinRelay(ctx, db.JoinRelayParams{Owner: pgID(owner), Channel: p.channel, LeaseSeconds: p.lease})
	})
}

func (p *postgres) claim(ctx context.Context, owner uuid.UUID) error {
	return p.membership(ctx, func(q *db.Queries) error {
		if err := q.RegisterShards(ctx, p.channel); err != nil { // somebody may have removed some
			return err
		}
		if err := q.ReapRelays(ctx, p.channel); err != nil {
			return err
		}
		return q.ClaimShards(ctx, db.ClaimShardsParams{Channel: p.channel, Owner: pgID(owner)})
	})
}

// membership runs a change of who owns what: the lock on the channel, then looks in fresh statements.
func (p *postgres) membership(ctx context.Context, change func(*db.Queries) error) error {
	ctx, cancel := context.WithTimeout(ctx, settleLimit) // somebody may hold the channel's row
	defer cancel()
	return pgx.BeginTxFunc(ctx, p.pool, readCommitted, func(tx pgx.Tx) error {
		q := db.New(p.schema.On(tx))
		if err := q.LockChannel(ctx, p.channel); err != nil {
			return err
		}
		return change(q)
	})
}

func (p *postgres) release(ctx context.Context, owner uuid.UUID, given []holding) error {
	params := db.ReleaseShardsParams{Channel: p.channel, Owner: pgID(owner)}
	for _, h := range given {
		params.Shards, params.Epochs = append(params.Shards, h.shard), append(params.Epochs, h.epoch)
	}
	return db.New(p.schema.On(p.pool)).ReleaseShards(ctx, params)
}

func (p *postgres) renew(ctx context.Context, owner uuid.UUID) (bool, error) {
	n, err := db.New(p.schema.On(p.pool)).RenewRelay(ctx, db.RenewRelayParams{LeaseSeconds: p.lease, Owner: pgID(owner)})
	return n == 1, err
}

func (p *postgres) leave(ctx context.Context, owner uuid.UUID) error {
	return db.New(p.schema.On(p.pool)).LeaveRelay(ctx, db.LeaveRelayParams{Channel: p.channel, Owner: pgID(owner)})
}

func (p *postgres) sentDays(ctx context.Context) error {
	return db.New(p.schema.On(p.pool)).SentDays(ctx)
}

func (p *postgres) connect(ctx context.Context) (link, error) {
	conn, err := p.pool.Acquire(ctx)
	if err != nil {
		return nil, err
	}
	nameColumns(conn.Conn().TypeMap())
	return &postgresLink{postgres: p, conn: conn, q: db.New(p.schema.On(conn))}, nil
}

// postgresLink is one connection of the relay's.
type postgresLink struct {
	*postgres
	conn  *pgxpool.Conn
	q     *db.Queries
	large bool // a payload of the last answer was larger than a row's share of the bytes
	turn  int  // which shard is the first in the next question
	hot   hotRows
}

// close ends the connection, for it is closed because something failed on it, or because the relay stops.
func (l *postgresLink) close() {
	conn := l.conn.Hijack()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	conn.Close(ctx)
}

func (l *postgresLink) position(ctx context.Context) (int64, error) { return l.q.LastPosition(ctx) }

func (l *postgresLink) serverStart(ctx context.Context) (time.Time, error) {
	return l.q.ServerStart(ctx)
}

func (l *postgresLink) writers(ctx context.Context) ([]writer, error) {
	open, err := l.q.OpenWriters(ctx)
	writers := make([]writer, len(open))
	for i, w := range open {
		writers[i] = writer{w.Writer, w.Pid}
	}
	return writers, err
}

func (l *postgresLink) look(ctx context.Context, owner uuid.UUID) (surroundings, error) {
	around, err := l.q.LookAround(ctx, db.LookAroundParams{Channel: l.channel, Owner: pgID(owner)})
	if err != nil {
		return surroundings{}, err
	}
	owned, err := l.q.OwnedShards(ctx, db.OwnedShardsParams{Channel: l.channel, Owner: pgID(owner)})
	s := surroundings{
		unclean: make(map[int16]probe), members: int(around.Members), rank: int(around.Rank),
		expired: around.Expired, free: int(around.Free), hold: around.DeadPolicy == "hold", keep: around.KeepDays > 0,
	}
	for _, o := range owned {
		s.held = append(s.held, holding{o.Shard, o.Epoch})
		if o.Unclean {
			s.unclean[o.Shard] = probe{o.Shard, o.ProbeID, o.ProbeCount > 1}
		}
	}
	return s, err
}

// poll asks without the sum over the answer for as long as no payload is larger than a row's share of the bytes. The shards
// are asked for in order; where the sum bounds the answer, another one comes first each time.
func (l *postgresLink) poll(ctx context.Context, from []cursor, bytes int64) ([]row, error) {
	most := int64(1)
	for _, c := range from {
		most += int64(c.limit)
	}
	share := min(bytes/most, math.MaxInt32)
	if !l.large {
		shards, floors, limits := asked(from, 0)
		err := l.hot.read(ctx, l, db.Poll, int32(share), shards, floors, limits, l.channel)
		l.large = slices.ContainsFunc(l.hot.rows, func(r row) bool { return r.Payload == nil })
		if err != nil || !l.large {
			return l.hot.rows, err
		}
	}
	l.turn++
	shards, floors, limits := asked(from, l.turn)
	err := l.hot.read(ctx, l, db.PollBounded, shards, floors, limits, l.channel, bytes)
	l.large = slices.ContainsFunc(l.hot.rows, func(r row) bool { return int64(len(r.Payload)) > share })
	return l.hot.rows, err
}

// asked lists the columns of a question, beginning with the cursor at turn.
func asked(from []cursor, turn int) (shards []int16, floors []int64, limits []int32) {
	shards, floors, limits = make([]int16, len(from)), make([]int64, len(from)), make([]int32, len(from))
	for i := range from {
		c := from[(i+turn)%len(from)]
		shards[i], floors[i], limits[i] = c.shard, c.floor, c.limit
	}
	return shards, floors, limits
}

func (l *postgresLink) due(ctx context.Context, shards []int16, keys, perKey int, bytes int64) ([]row, error) {
	read, err := l.q.DueDeferred(ctx, db.DueDeferredParams{Channel: l.channel, Shards: shards, KeyLimit: int32(keys), PerKey: int32(perKey), ByteLimit: bytes})
	rows := make([]row, len(read))
	for i, r := range read {
		rows[i] = l.row(ref{r.Shard, r.ID, true}, r)
		rows[i].deadly = r.LastError == errRelayDied.Error()
	}
	return rows, err
}

func (l *postgresLink) read(ctx context.Context, at []ref) ([]row, error) {
	shards, ids := columns(at)
	read, err := l.q.ReadMessages(ctx, db.ReadMessagesParams{Channel: l.channel, Shards: shards, Ids: ids})
	rows := make([]row, len(read))
	for i, r := range read {
		rows[i] = l.row(ref{r.Shard, r.ID, r.Deferred}, db.DueDeferredRow{
			ID: r.ID, CreatedAt: r.CreatedAt, MessageID: r.MessageID, Shard: r.Shard,
			Key: r.Key, Topic: r.Topic, ContentType: r.ContentType, Headers: r.Headers, Payload: r.Payload, Attempts: r.Attempts,
		})
	}
	return rows, err
}

// row makes what a publisher gets.
func (l *postgresLink) row(at ref, r db.DueDeferredRow) row {
	out := row{ref: at, Record: Record{
		Message:  Message{ID: r.MessageID.Bytes, Channel: l.channel, Topic: r.Topic, Key: r.Key, ContentType: r.ContentType, Payload: r.Payload},
		Position: at.id, EnqueuedAt: r.CreatedAt, Attempt: int(r.Attempts) + 1,
	}}
	out.setHeaders(string(r.Headers))
	return out
}

func (l *postgresLink) blocked(ctx context.Context, shards []int16) ([]keyRef, error) {
	read, err := l.q.BlockedKeys(ctx, db.BlockedKeysParams{Channel: l.channel, Shards: shards})
	keys := make([]keyRef, len(read))
	for i, k := range read {
		keys[i] = keyRef{k.Shard, k.Key}
	}
	return keys, err
}

func (l *postgresLink) drained(ctx context.Context, shards []int16, limit int) ([]keyRef, error) {
	read, err := l.q.DueDrained(ctx, db.DueDrainedParams{Channel: l.channel, Shards: shards, KeyLimit: int32(limit)})
	keys := make([]keyRef, len(read))
	for i, k := range read {
		keys[i] = keyRef{k.Shard, k.Key}
	}
	return keys, err
}

func (l *postgresLink) nextDue(ctx context.Context, shards []int16) (time.Duration, bool, error) {
	seconds, err := l.q.NextDue(ctx, db.NextDueParams{Channel: l.channel, Shards: shards})
	if err != nil || math.IsInf(seconds, 1) {
		return 0, false, err
	}
	return time.Duration(seconds * float64(time.Second)), true, nil
}

func (l *postgresLink) moveScheduled(ctx context.Context, atMost int) (int, time.Duration, error) {
	r, err := l.q.MoveScheduled(ctx, db.MoveScheduledParams{Channel: l.channel, AtMost: int32(atMost)})
	if err != nil {
		return 0, 0, err
	}
	return int(r.Moved), time.Duration(min(r.NextIn, time.Hour.Seconds()) * float64(time.Second)), nil
}

// confirm deletes messages from where they were read. What is missing there is looked for by its position, in hot, then among
// the deferred, of which some were read; the last look is for what a later owner declared dead.
func (l *postgresLink) confirm(ctx context.Context, confirmed []found, keep bool) error {
	left := int64(len(confirmed))
	if at := placed(confirmed); len(at) > 0 {
		tag, err := l.schema.On(l.conn).Exec(ctx, removal(keep), places(at), positions(at), messageIDs(at))
		if left -= tag.RowsAffected(); err != nil || left == 0 {
			return err
		}
	}
	return l.confirmElsewhere(ctx, confirmed, keep, left)
}

// removal is the statement that removes messages from where they were read.
func removal(keep bool) string {
	if keep {
		return db.KeepAt
	}
	return db.DeleteAt
}

// confirmElsewhere deletes messages by their positions, of which some are left.
func (l *postgresLink) confirmElsewhere(ctx context.Context, confirmed []found, keep bool, left int64) error {
	p := l.byPosition(confirmed)
	if keep {
		_, err := l.q.KeepConfirmed(ctx, db.KeepConfirmedParams(p))
		return err
	}
	for _, remove := range []func() (int64, error){
		func() (int64, error) { return l.q.DeleteConfirmed(ctx, p) },
		func() (int64, error) { return l.q.DeleteConfirmedDeferred(ctx, db.DeleteConfirmedDeferredParams(p)) },
		func() (int64, error) { return l.q.DeleteConfirmedDead(ctx, db.DeleteConfirmedDeadParams(p)) },
	} {
		n, err := remove()
		if left -= n; err != nil || left == 0 {
			return err
		}
	}
	return nil
}

func (l *postgresLink) byPosition(confirmed []found) db.DeleteConfirmedParams {
	p := db.DeleteConfirmedParams{Channel: l.channel}
	for _, c := range confirmed {
		p.Shards, p.Ids, p.MessageIds = append(p.Shards, c.shard), append(p.Ids, c.id), append(p.MessageIds, pgID(c.message))
	}
	return p
}

func columns(refs []ref) (shards []int16, ids []int64) {
	for _, r := range refs {
		shards, ids = append(shards, r.shard), append(ids, r.id)
	}
	return shards, ids
}

// apply: the fence first, then every change in a fresh statement, for the shards that passed it.
func (l *postgresLink) apply(ctx context.Context, owner uuid.UUID, epochs map[int16]int64, c change) (outcome, error) {
	var done outcome
	err := pgx.BeginTxFunc(ctx, l.conn, readCommitted, func(tx pgx.Tx) error {
		q := db.New(l.schema.On(tx))
		lost, err := l.fence(ctx, q, owner, epochs, &c)
		if err != nil {
			return err
		}
		done = outcome{lost: lost}
		for _, step := range []func(context.Context, *db.Queries, *change) error{
			l.blockKeys, l.holdKeys, l.deferMessages, l.failDeferred, l.bury, l.markProbes, l.markClean,
		} {
			if err := step(ctx, q, &c); err != nil {
				return err
			}
		}
		done.free, err = l.unblock(ctx, q, &c)
		return err
	})
	return done, err
}

// claimed says which shards the owner believes to hold.
func (l *postgresLink) claimed(owner uuid.UUID, epochs map[int16]int64, shards []int16) db.FenceParams {
	p := db.FenceParams{Channel: l.channel, Owner: pgID(owner), Shards: shards}
	for _, s := range shards {
		p.Epochs = append(p.Epochs, epochs[s])
	}
	return p
}

// settle ends a round in which some shard has a blocked key, so it is one round trip and one transaction. The shards' rows are
// locked before those of messages, as in apply. Messages that do not lie any more where they were read are gone through
// by their positions, and if a shard was lost, so is what was to move there.
func (l *postgresLink) settle(ctx context.Context, owner uuid.UUID, epochs map[int16]int64, confirmed []found, keep bool, followers []found) (lost []int16, err error) {
	rest := change{deferred: make([]failure, len(followers))}
	for i, f := range followers {
		rest.deferred[i].ref = f.ref
	}
	p := l.claimed(owner, epochs, rest.shards())
	var removed, moved int64
	batch := new(pgx.Batch)
	batch.BeginTx(readCommitted)
	batch.Queue(l.schema.Rewrite(db.MoveFollowers), p.Channel, p.Owner, p.Shards, p.Epochs,
		places(followers), positions(followers), messageIDs(followers)).Exec(counted(&moved))
	if at := placed(confirmed); len(at) > 0 {
		batch.Queue(l.schema.Rewrite(removal(keep)), places(at), positions(at), messageIDs(at)).Exec(counted(&removed))
	}
	batch.Queue(schema.Commit)
	results := l.conn.SendBatch(ctx, batch)
	tx := results.Tx()
	if err := results.Close(); err != nil {
		return nil, errors.Join(err, tx.Rollback(ctx))
	}
	if left := int64(len(confirmed)) - removed; left > 0 {
		if err := l.confirmElsewhere(ctx, confirmed, keep, left); err != nil {
			return nil, err
		}
	}
	if int(moved) == len(followers) {
		return nil, nil
	}
	done, err := l.apply(ctx, owner, epochs, rest)
	return done.lost, err
}

func counted(n *int64) func(pgconn.CommandTag) error {
	return func(tag pgconn.CommandTag) error {
		*n = tag.RowsAffected()
		return nil
	}
}

// fence locks the shards that c touches, and takes out of c what concerns shards that are lost.
func (l *postgresLink) fence(ctx context.Context, q *db.Queries, owner uuid.UUID, epochs map[int16]int64, c *change) ([]int16, error) {
	p := l.claimed(owner, epochs, c.shards())
	kept, err := q.Fence(ctx, p)
	if err != nil {
		return nil, err
	}
	lost := slices.DeleteFunc(p.Shards, func(s int16) bool { return slices.Contains(kept, s) })
	if len(lost) > 0 {
		*c = c.without(lost)
	}
	return lost, nil
}

func (l *postgresLink) blockKeys(ctx context.Context, q *db.Queries, c *change) error {
	if len(c.block) == 0 {
		return nil
	}
	p := db.BlockKeysParams{Channel: l.channel}
	for _, b := range c.block {
		p.Shards, p.Keys, p.Delays = append(p.Shards, b.shard), append(p.Keys, b.key), append(p.Delays, b.delay.Seconds())
	}
	return q.BlockKeys(ctx, p)
}

func (l *postgresLink) holdKeys(ctx context.Context, q *db.Queries, c *change) error {
	if len(c.hold) == 0 {
		return nil
	}
	p := db.HoldKeysParams{Channel: l.channel}
	for _, h := range c.hold {
		p.Shards, p.Keys, p.Ids = append(p.Shards, h.shard), append(p.Keys, h.key), append(p.Ids, h.id)
	}
	return q.HoldKeys(ctx, p)
}

func (l *postgresLink) deferMessages(ctx context.Context, q *db.Queries, c *change) error {
	if len(c.deferred) == 0 {
		return nil
	}
	p := db.DeferMessagesParams{Channel: l.channel}
	for _, f := range c.deferred {
		p.Shards, p.Ids, p.Attempts = append(p.Shards, f.shard), append(p.Ids, f.id), append(p.Attempts, int32(f.attempts))
		p.Errors, p.Delays = append(p.Errors, f.text), append(p.Delays, f.delay.Seconds())
	}
	_, err := q.DeferMessages(ctx, p)
	return err
}

func (l *postgresLink) failDeferred(ctx context.Context, q *db.Queries, c *change) error {
	if len(c.failed) == 0 {
		return nil
	}
	p := db.FailDeferredParams{Channel: l.channel}
	for _, f := range c.failed {
		p.Shards, p.Ids, p.Spent = append(p.Shards, f.shard), append(p.Ids, f.id), append(p.Spent, int32(min(f.attempts, 1)))
		p.Errors, p.Delays = append(p.Errors, f.text), append(p.Delays, f.delay.Seconds())
	}
	_, err := q.FailDeferred(ctx, p)
	return err
}

func (l *postgresLink) bury(ctx context.Context, q *db.Queries, c *change) error {
	if len(c.buried) == 0 {
		return nil
	}
	p := db.BuryMessagesParams{Channel: l.channel}
	for _, f := range c.buried {
		p.Shards, p.Ids, p.Deferred, p.Errors = append(p.Shards, f.shard), append(p.Ids, f.id), append(p.Deferred, f.deferred), append(p.Errors, f.text)
	}
	_, err := q.BuryMessages(ctx, p)
	return err
}

func (l *postgresLink) markProbes(ctx context.Context, q *db.Queries, c *change) error {
	if len(c.probes) == 0 {
		return nil
	}
	p := db.MarkProbesParams{Channel: l.channel}
	for _, n := range c.probes {
		count := int32(1)
		if n.alone {
			count = 2
		}
		p.Shards, p.Ids, p.Counts = append(p.Shards, n.shard), append(p.Ids, n.id), append(p.Counts, count)
	}
	return q.MarkProbes(ctx, p)
}

func (l *postgresLink) markClean(ctx context.Context, q *db.Queries, c *change) error {
	if len(c.clean) == 0 {
		return nil
	}
	return q.MarkClean(ctx, db.MarkCleanParams{Channel: l.channel, Shards: c.clean})
}

func (l *postgresLink) unblock(ctx context.Context, q *db.Queries, c *change) (free []keyRef, err error) {
	if len(c.unblock) == 0 {
		return nil, nil
	}
	p := db.UnblockKeysParams{Channel: l.channel}
	for _, k := range c.unblock {
		p.Shards, p.Keys = append(p.Shards, k.shard), append(p.Keys, k.key)
	}
	rows, err := q.UnblockKeys(ctx, p)
	for _, r := range rows {
		free = append(free, keyRef{r.Shard, r.Key})
	}
	return free, err
}
