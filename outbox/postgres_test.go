package outbox

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/testenv"
)

// ownedStore is a store with one relay that owns every shard.
func ownedStore(t *testing.T) (*testenv.DB, contractStore, uuid.UUID) {
	t.Helper()
	db, s := newPostgresStore(t, time.Hour)
	return db, s, s.owner(t)
}

// Eight writers hold their transactions open, roll back to savepoints and abort. Whatever the gate calls resolved, no
// message at or below it may become visible later.
func TestA1_NoFloorIsPassedByACommit(t *testing.T) {
	t.Parallel()
	db, s, _ := ownedStore(t)
	g := newGate(RelayConfig{}.withDefaults(), s.store)
	defer g.close()
	var done atomic.Bool
	var commits atomic.Int64
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			for !done.Load() {
				if hold(t, db) {
					commits.Add(1)
				}
			}
		})
	}
	type floor struct {
		resolved int64
		visible  int
	}
	var floors []floor
	naive := 0 // floors that the last position alone would have got wrong
	var positions []floor
	for until := time.Now().Add(4 * time.Second); time.Now().Before(until); time.Sleep(checkpointEvery / 2) {
		must(t, g.look(t.Context(), time.Now()))
		v, _ := g.view()
		floors = append(floors, floor{v.resolved, visible(t, db, v.resolved)})
		positions = append(positions, floor{g.position, visible(t, db, g.position)})
	}
	done.Store(true)
	group.Wait()
	moved := 0
	for i, f := range floors {
		if n := visible(t, db, f.resolved); n != f.visible {
			t.Errorf("floor %d: %d messages were visible at or below it, later %d", f.resolved, f.visible, n)
		}
		if i > 0 && f.resolved > floors[i-1].resolved {
			moved++
		}
		if visible(t, db, positions[i].resolved) != positions[i].visible {
			naive++
		}
	}
	if moved < 10 || naive == 0 {
		t.Errorf("the test shows nothing: %d floors moved, the last position would have been wrong %d times", moved, naive)
	}
	t.Logf("%d commits, %d floors, %d moved, %d would have been wrong without the look at open writers", commits.Load(), len(floors), moved, naive)
}

func visible(t *testing.T, db *testenv.DB, upTo int64) (n int) {
	t.Helper()
	must(t, db.Pool.QueryRow(t.Context(), "select count(*) from commitbox.outbox_message where id <= $1", upTo).Scan(&n))
	return n
}

// hold runs one business transaction and says whether it committed.
func hold(t *testing.T, db *testenv.DB) bool {
	abort := errors.New("abort")
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		err := pgx.BeginFunc(t.Context(), tx, func(nested pgx.Tx) error {
			_, err := Enqueue(t.Context(), nested, Message{Topic: "t", Payload: []byte("x")})
			if err == nil && rand.IntN(4) == 0 {
				return abort
			}
			return err
		})
		if err != nil && !errors.Is(err, abort) {
			return err
		}
		if _, err := Enqueue(t.Context(), tx, Message{Topic: "t", Key: "k", Payload: []byte("y")}); err != nil {
			return err
		}
		time.Sleep(rand.N(60 * time.Millisecond))
		if rand.IntN(6) == 0 {
			return abort
		}
		return nil
	})
	if err != nil && !errors.Is(err, abort) {
		t.Error(err)
	}
	return err == nil
}

func TestA3_AFollowerWithoutABlockedKeyIsImpossible(t *testing.T) {
	t.Parallel()
	db, s, owner := ownedStore(t)
	s.put(t, "a", "a1", "a2")
	rows := s.poll(t, 10, 1<<20, 0)
	epochs := epochsOf(s.look(t, owner))
	_, err := s.link.settle(t.Context(), owner, epochs, []found{{rows[0].ref, rows[0].ID, rows[0].place}}, false, []found{{rows[1].ref, rows[1].ID, rows[1].place}})
	if pg := (*pgconn.PgError)(nil); !errors.As(err, &pg) || pg.Code != "23503" {
		t.Fatalf("a follower without its key's row: %v", err)
	}
	expect(t, "hot after the refusal", 2, len(s.poll(t, 10, 1<<20, 0)))

	// A key that drains while another session holds the shard: the look behind it comes after the wait.
	key := rows[0].keyRef()
	_, err = s.link.apply(t.Context(), owner, epochs, change{block: []blocked{{key, 0}}})
	must(t, err)
	tx, err := db.Pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), "select 1 from commitbox.outbox_shard where channel = 'default' and shard = $1 for no key update", key.shard)
	must(t, err)
	freed := make(chan outcome, 1)
	go func() {
		done, err := s.link.apply(t.Context(), owner, epochs, change{unblock: []keyRef{key}})
		if err != nil {
			t.Error(err)
		}
		freed <- done
	}()
	time.Sleep(100 * time.Millisecond)
	_, err = tx.Exec(t.Context(), `with gone as (delete from commitbox.outbox_message where id = $1 returning *)
		insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, key, topic, headers, payload)
		select id, created_at, message_id, shard, channel, key, topic, headers, payload from gone`, rows[1].id)
	must(t, err)
	must(t, tx.Commit(t.Context()))
	expect(t, "freed with a follower left", 0, len((<-freed).free))
}

func TestA5_AStaleConfirmationRemovesNoNewCopy(t *testing.T) {
	t.Parallel()
	db, s, owner := ownedStore(t)
	s.put(t, "a", "a1")
	a1 := s.poll(t, 10, 1<<20, 0)[0]
	_, err := s.link.apply(t.Context(), owner, epochsOf(s.look(t, owner)), change{buried: []failure{{ref: a1.ref, text: "x"}}})
	must(t, err)
	var requeued bool
	must(t, db.Pool.QueryRow(t.Context(), "select commitbox.outbox_requeue('default', $1)", a1.ID.String()).Scan(&requeued))
	must(t, s.link.confirm(t.Context(), []found{{a1.ref, a1.ID, a1.place}}, false)) // a former owner's, late
	after := s.poll(t, 10, 1<<20, 0)
	if !requeued || len(after) != 1 || after[0].ID != a1.ID || after[0].id == a1.id {
		t.Errorf("requeued %v; in hot now: %+v", requeued, after)
	}
	must(t, s.link.confirm(t.Context(), []found{{after[0].ref, after[0].ID, after[0].place}}, false))
	must(t, s.link.confirm(t.Context(), []found{{after[0].ref, after[0].ID, after[0].place}}, false)) // again, its answer was lost
	expect(t, "hot after the confirmation", 0, len(s.poll(t, 10, 1<<20, 0)))
}

// A server that lost positions draws them again, beside a message that waits in deferred: it does not die with the new one.
func TestABuriedMessageTakesNoOtherOfItsPositionAlong(t *testing.T) {
	t.Parallel()
	db, s, owner := ownedStore(t)
	s.put(t, "a", "a1")
	a1 := s.poll(t, 10, 1<<20, 0)[0]
	_, err := db.Pool.Exec(t.Context(), `insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, topic, headers, payload, due_at)
		select id, created_at, gen_random_uuid(), shard, channel, topic, headers, 'older', now() from commitbox.outbox_message`)
	must(t, err)
	_, err = s.link.apply(t.Context(), owner, epochsOf(s.look(t, owner)), change{buried: []failure{{ref: a1.ref, text: "x"}}})
	must(t, err)
	expect(t, "hot", 0, len(s.poll(t, 10, 1<<20, 0)))
	expect(t, "deferred", []string{"older"}, s.due(t))
}

// A place is where a row lay when it was read. After a rewrite of the table another row may lie there, or none.
func TestA5_AConfirmationTrustsNoPlace(t *testing.T) {
	t.Parallel()
	_, s, _ := ownedStore(t)
	s.put(t, "a", "a1", "a2", "a3", "a4")
	a := s.poll(t, 10, 1<<20, 0)
	nowhere := pgtype.TID{BlockNumber: 1 << 20, OffsetNumber: 1, Valid: true}
	for _, c := range []struct {
		what      string
		confirmed []found
		left      []string
	}{
		{"a1 where a2 lies", []found{{a[0].ref, a[0].ID, a[1].place}}, []string{"a2", "a3", "a4"}},
		{"a1 again", []found{{a[0].ref, a[0].ID, a[1].place}}, []string{"a2", "a3", "a4"}},
		{"a3 where nothing lies", []found{{a[2].ref, a[2].ID, nowhere}}, []string{"a2", "a4"}},
		{"positions drawn twice, for other messages", []found{{a[1].ref, a[3].ID, a[1].place}, {a[3].ref, a[1].ID, a[3].place}}, []string{"a2", "a4"}},
	} {
		must(t, s.link.confirm(t.Context(), c.confirmed, false))
		expect(t, c.what, c.left, texts(s.poll(t, 10, 1<<20, 0)))
	}
}

// What comes behind a failed message is moved from wherever it lies by now, and nothing else in its place.
func TestA3_FollowersAreMovedFromWhereverTheyLie(t *testing.T) {
	t.Parallel()
	_, s, owner := ownedStore(t)
	s.put(t, "a", "a1", "a2", "a3", "a4")
	a, epochs := s.poll(t, 10, 1<<20, 0), epochsOf(s.look(t, owner))
	_, err := s.link.apply(t.Context(), owner, epochs, change{
		block: []blocked{{a[0].keyRef(), 0}}, deferred: []failure{{ref: a[0].ref, attempts: 1, text: "x"}},
	})
	must(t, err)
	_, err = s.link.settle(t.Context(), owner, epochs, nil, false, []found{{a[1].ref, a[1].ID, a[2].place}, {a[3].ref, a[3].ID, a[3].place}})
	must(t, err)
	expect(t, "hot", []string{"a3"}, texts(s.poll(t, 10, 1<<20, 0)))
	expect(t, "deferred", []string{"a1", "a2", "a4"}, s.due(t))
}

// A payload that is larger than a row's share of the bytes is not read by the short way, and what is small is again
// once it has gone.
func TestH4_LargePayloadsComeWithinTheBound(t *testing.T) {
	t.Parallel()
	_, s, _ := ownedStore(t)
	const bound = 64 << 10
	large := strings.Repeat("x", bound/2)
	s.put(t, "a", "a1", large, "a3", large, large, "a6")
	link := s.link.(*postgresLink)
	first := s.poll(t, 10, bound, 0)
	expect(t, "until the bound is crossed", []string{"a1", large, "a3", large}, texts(first))
	expect(t, "by the long way next", true, link.large)
	for _, r := range first {
		must(t, s.link.confirm(t.Context(), []found{{r.ref, r.ID, r.place}}, false))
	}
	rest := s.poll(t, 10, bound, 0)
	expect(t, "the rest", []string{large, "a6"}, texts(rest))
	must(t, s.link.confirm(t.Context(), []found{{rest[0].ref, rest[0].ID, rest[0].place}}, false))
	expect(t, "the last", []string{"a6"}, texts(s.poll(t, 10, bound, 0)))
	expect(t, "by the short way next", false, link.large)
}

// Large messages of one shard, of which each fills an answer, hide those of no other.
func TestH5_LargeMessagesOfOneShardHideNoOther(t *testing.T) {
	t.Parallel()
	_, s, _ := ownedStore(t)
	const bound = 1 << 10
	large := strings.Repeat("x", bound)
	for _, key := range []string{"a", "b", "c"} {
		s.put(t, key, large, large, large)
	}
	seen := map[string]bool{}
	for range shards {
		rows := s.poll(t, 10, bound, 0)
		expect(t, "rows within the bound", 1, len(rows))
		for _, r := range rows {
			seen[r.Key] = true
		}
	}
	expect(t, "keys seen", 3, len(seen))
}

func TestB05_AClaimNeverTakesMoreThanItsShare(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for _, off := range []string{"hashagg", "hashjoin", "mergejoin", "sort", "material", "memoize", "indexscan", "bitmapscan", "indexonlyscan"} {
		_, err := db.Pool.Exec(t.Context(), fmt.Sprintf("alter database %s set enable_%s = off", db.Name, off))
		must(t, err)
	}
	s, closeStore, err := openPostgres(t.Context(), db.Pool, RelayConfig{}.withDefaults())
	must(t, err)
	defer closeStore()
	var owners []uuid.UUID
	for range 3 {
		owners = append(owners, uuid.New())
		must(t, s.join(t.Context(), owners[len(owners)-1]))
	}
	l, err := s.connect(t.Context())
	must(t, err)
	defer l.close()
	for i, owner := range owners {
		must(t, s.claim(t.Context(), owner))
		around, err := l.look(t.Context(), owner)
		must(t, err)
		if want := fairShare(3, i); len(around.held) != want {
			t.Errorf("relay %d claimed %d shards, its share is %d", i, len(around.held), want)
		}
	}
}

// A poll whose plan was made while the table was empty.
func TestH1_PollsArePlannedForEveryCall(t *testing.T) {
	t.Parallel()
	db, s, _ := ownedStore(t)
	_, err := db.Pool.Exec(t.Context(), "vacuum analyze commitbox.outbox_message")
	must(t, err)
	for range 20 {
		s.poll(t, 16, 1<<20, 0)
	}
	_, err = db.Pool.Exec(t.Context(), `insert into commitbox.outbox_message (message_id, channel, topic, payload)
		select gen_random_uuid(), 'default', 't', 'x' from generate_series(1, 100000)`)
	must(t, err)
	best := time.Hour
	for range 5 {
		started := time.Now()
		if n := len(s.poll(t, 16, 1<<20, 0)); n != 16*shards {
			t.Fatalf("%d rows, want %d", n, 16*shards)
		}
		best = min(best, time.Since(started))
	}
	// The stale plan takes a second: a sequential scan for each of 64 shards.
	if best > 300*time.Millisecond {
		t.Errorf("the fastest of five polls took %v", best)
	}
	var prepared int
	must(t, s.link.(*postgresLink).conn.QueryRow(t.Context(), "select count(*) from pg_prepared_statements").Scan(&prepared))
	if prepared > 0 {
		t.Errorf("%d prepared statements on a relay's connection", prepared)
	}
}

// Claims wait for the lock on the channel's row: looking without it, they would take shards from a relay that has joined
// meanwhile.
func TestA4_ClaimsRunUnderTheChannelsLock(t *testing.T) {
	t.Parallel()
	db, s, owner := ownedStore(t)
	tx, err := db.Pool.Begin(t.Context())
	must(t, err)
	_, err = tx.Exec(t.Context(), "select 1 from commitbox.outbox_channel for no key update")
	must(t, err)
	claimed := make(chan error, 1)
	go func() { claimed <- s.claim(t.Context(), owner) }()
	select {
	case err := <-claimed:
		t.Fatalf("a claim did not wait for the channel's lock: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	must(t, tx.Commit(t.Context()))
	must(t, <-claimed)
}

// A key that a dead message holds, or that is parked, keeps its reason when a failure of it is recorded.
func TestA3_AFailureUnblocksNothing(t *testing.T) {
	t.Parallel()
	db, s, owner := ownedStore(t)
	s.put(t, "a", "a1")
	key := s.poll(t, 10, 1<<20, 0)[0].keyRef()
	for _, reason := range []string{"parked", "dead"} {
		_, err := db.Pool.Exec(t.Context(), `insert into commitbox.outbox_blocked (channel, shard, key, due_at, reason, dead_id)
			values ('default', $1, 'a', 'infinity', $2, case when $2 = 'dead' then 1 end)`, key.shard, reason)
		must(t, err)
		_, err = s.link.apply(t.Context(), owner, epochsOf(s.look(t, owner)), change{block: []blocked{{key, 0}}, unblock: []keyRef{key}})
		must(t, err)
		var still string
		must(t, db.Pool.QueryRow(t.Context(), "delete from commitbox.outbox_blocked returning reason").Scan(&still))
		if still != reason {
			t.Errorf("the key was %s and is now %s", reason, still)
		}
	}
}

// Who has not the lead locks no scheduled message: the leader would skip it, and move it behind later ones of its key.
func TestP8_WhoDoesNotLeadLocksNoScheduledMessage(t *testing.T) {
	t.Parallel()
	base := testenv.Database(t)
	_, err := base.Pool.Exec(t.Context(), "insert into commitbox.outbox_scheduled (due_at, message_id, channel, key, topic, payload) select now(), gen_random_uuid(), 'default', 'k', 't', '' from generate_series(1, 5)")
	must(t, err)
	leader, err := base.Pool.Begin(t.Context())
	must(t, err)
	defer func() { _ = leader.Rollback(context.Background()) }()
	_, err = leader.Exec(t.Context(), "select pg_advisory_xact_lock(hashtextextended('default', 'commitbox.outbox_scheduled'::regclass::oid::bigint))")
	must(t, err)
	other, err := base.Pool.Begin(t.Context())
	must(t, err)
	defer func() { _ = other.Rollback(context.Background()) }()
	moved, err := db.New(other).MoveScheduled(t.Context(), db.MoveScheduledParams{Channel: "default", AtMost: 100})
	must(t, err)
	expect(t, "moved without the lead", int64(0), moved.Moved)
	var free int
	must(t, leader.QueryRow(t.Context(), "select count(*) from (select 1 from commitbox.outbox_scheduled where due_at <= now() for update skip locked) x").Scan(&free))
	expect(t, "left to the leader", 5, free)
}
