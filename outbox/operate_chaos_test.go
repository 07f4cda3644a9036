package outbox_test

import (
	"cmp"
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

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// operatorAction is one thing that an operator does to the keys of its own, again and again.
type operatorAction struct {
	name    string
	dies    bool // its messages may be refused for good
	removes bool // it takes messages out of the order of their keys
	do      func(ctx context.Context, o *outbox.Operator, topic, key string) (done int, err error)
	sql     string // the same in SQL, of a topic and a key; it says how many
}

func once(err error) (int, error) {
	if err != nil {
		return 0, err
	}
	return 1, nil
}

// aDead does something to a dead message of a topic.
func aDead(do func(o *outbox.Operator, ctx context.Context, channel string, id uuid.UUID, reason string) error) func(context.Context, *outbox.Operator, string, string) (int, error) {
	return func(ctx context.Context, o *outbox.Operator, topic, _ string) (int, error) {
		dead, err := o.Dead(ctx, channel, topic, outbox.DeadCursor{}, 10)
		if err != nil || len(dead) == 0 {
			return 0, err
		}
		return once(do(o, ctx, channel, dead[rand.IntN(len(dead))].ID, ""))
	}
}

var operatorActions = []operatorAction{
	{"retry now", false, false, func(ctx context.Context, o *outbox.Operator, _, key string) (int, error) {
		return once(o.Retry(ctx, channel, key, ""))
	}, `select outbox_retry('default', $2)::int from (values ($1)) v`},
	{"park", false, false, func(ctx context.Context, o *outbox.Operator, _, key string) (int, error) {
		err := o.Park(ctx, channel, key, "")
		if errors.Is(err, outbox.ErrNotFound) {
			return 0, o.Release(ctx, channel, key, "") // for the next time
		}
		return once(err)
	}, `select case when outbox_park('default', $2) then 1 else outbox_release('default', $2)::int * 0 end from (values ($1)) v`},
	{"release", false, false, func(ctx context.Context, o *outbox.Operator, _, key string) (int, error) {
		if err := o.Park(ctx, channel, key, ""); err != nil {
			return 0, err
		}
		return once(o.Release(ctx, channel, key, ""))
	}, `select case when outbox_park('default', $2) is not null then outbox_release('default', $2)::int end from (values ($1)) v`},
	{"skip head", true, true, func(ctx context.Context, o *outbox.Operator, _, key string) (int, error) {
		_, err := o.SkipHead(ctx, channel, key, "")
		return once(err)
	}, `select (outbox_skip_head('default', $2) is not null)::int from (values ($1)) v`},
	{"requeue one", true, false, aDead((*outbox.Operator).Requeue), `select coalesce(sum(outbox_requeue('default', message_id)::int), 0) from (select * from outbox_dead where topic = $1 and key = $2 and discarded_at is null limit 1) d`},
	{"requeue by topic", true, false, func(ctx context.Context, o *outbox.Operator, topic, _ string) (int, error) {
		return o.RequeueMany(ctx, outbox.RequeueFilter{Topic: topic, Rate: 1000})
	}, `select outbox_requeue_many('default', $1)::int from (values ($2)) v`},
	{"requeue by time", true, false, func(ctx context.Context, o *outbox.Operator, topic, _ string) (int, error) {
		now := time.Now()
		return o.RequeueMany(ctx, outbox.RequeueFilter{Topic: topic, Since: now.Add(-time.Minute), Until: now, Rate: 1000})
	}, `select outbox_requeue_many('default', $1, now() - interval '1 minute', now())::int from (values ($2)) v`},
	{"discard", true, true, aDead((*outbox.Operator).Discard), `select coalesce(sum(outbox_discard('default', message_id)::int), 0) from (select * from outbox_dead where topic = $1 and key = $2 and discarded_at is null limit 1) d`},
	{"replay", false, false, func(ctx context.Context, o *outbox.Operator, _, key string) (int, error) {
		return o.Replay(ctx, outbox.ReplayFilter{Since: time.Now().Add(-200 * time.Millisecond), Key: key, Rate: 1000})
	}, `select done::int from outbox_replay('default', now() - interval '0.2 s', now(), $1, $2)`},
	{"any", true, true, nil, ""}, // each of the others in SQL, on the same keys
}

// inSQL is an operator with psql: the same by hand.
func inSQL(ctx context.Context, db *testenv.DB, sql, topic, key string) (done int, err error) {
	err = pgx.BeginFunc(ctx, db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `set local search_path = commitbox; set local lock_timeout = '2s'`); err != nil {
			return err
		}
		return tx.QueryRow(ctx, sql, topic, key).Scan(&done)
	})
	if err != nil {
		return 0, err
	}
	return done, nil
}

func (a *operatorAction) topic() string {
	name := strings.ReplaceAll(a.name, " ", "-")
	if a.dies {
		return mortal + name
	}
	return name
}

func (a *operatorAction) key(n int) string { return fmt.Sprint(a.topic(), "-", n) }

const keysOfAction = 2

// Every action of an operator on keys of which messages are being sent, refused and given up, while relays are killed:
// nothing is lost, and the order of the keys is what the policy says.
func TestA8_EveryOperatorActionWhileRelaysAreKilled(t *testing.T) {
	for _, policy := range []string{"hold", "skip"} {
		t.Run(policy, func(t *testing.T) {
			t.Parallel()
			operateUnderKills(t, policy)
		})
	}
}

func operateUnderKills(t *testing.T, policy string) {
	db := testenv.Database(t)
	o := newOperator(t, db)
	for _, sql := range []string{
		brokerTable, `create table died (key text, payload text)`,
		`create function note_death() returns trigger language plpgsql as $$ begin
			insert into public.died values (new.key, convert_from(new.payload, 'UTF8')); return null; end $$`,
		`create trigger note_death after insert on commitbox.outbox_dead for each row execute function note_death()`,
		fmt.Sprintf(`insert into commitbox.outbox_channel (channel, dead_policy, keep_days) values ('default', '%s', 1)`, policy),
	} {
		_, err := db.Pool.Exec(t.Context(), sql)
		must(t, err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	defer cancel()
	var group sync.WaitGroup
	var done atomic.Bool
	enqueued := 0 // of each key
	group.Go(func() {
		for ; !done.Load(); enqueued++ {
			var messages []outbox.Message
			for i := range operatorActions {
				for n := range keysOfAction {
					a := &operatorActions[i]
					messages = append(messages, outbox.Message{Topic: a.topic(), Key: a.key(n), Payload: []byte(fmt.Sprint(enqueued))})
				}
			}
			enqueue(t, db, messages...)
			time.Sleep(40 * time.Millisecond)
		}
	})
	inGo, bySQL := make([]atomic.Int64, len(operatorActions)), make([]atomic.Int64, len(operatorActions))
	for i := range operatorActions {
		a := &operatorActions[i]
		group.Go(func() {
			for turn := 0; !done.Load(); turn++ {
				key, sql := a.key(rand.IntN(keysOfAction)), a.sql
				if a.do == nil {
					sql = operatorActions[rand.IntN(len(operatorActions)-1)].sql
				}
				var n int
				var err error
				if a.do == nil || turn%2 == 1 {
					n, err = inSQL(ctx, db, sql, a.topic(), key)
					bySQL[i].Add(int64(n))
				} else {
					n, err = a.do(ctx, o, a.topic(), key)
					inGo[i].Add(int64(n))
				}
				if err != nil && !errors.Is(err, outbox.ErrNotFound) && !transientInSQL(err) {
					t.Errorf("%s: %v", a.name, err)
				}
				time.Sleep(25 * time.Millisecond)
			}
		})
	}
	const failing = 30 // percent
	processes := []*relayProcess{startProcess(t, db, failing), startProcess(t, db, failing)}
	everyWay := func() bool {
		for i := range operatorActions {
			if operatorActions[i].do != nil && inGo[i].Load() == 0 || bySQL[i].Load() == 0 {
				return false
			}
		}
		return true
	}
	for started := time.Now(); time.Since(started) < soak(9*time.Second, 5*time.Minute) || !everyWay() && time.Since(started) < 2*time.Minute; {
		time.Sleep(1500 * time.Millisecond) // half as long again as a lease
		i := rand.IntN(len(processes))
		processes[i].kill()
		processes[i] = startProcess(t, db, failing)
	}
	done.Store(true)
	group.Wait()
	for _, p := range processes {
		p.kill()
	}
	startProcess(t, db, 0)
	settleActions(t, db, o)
	for i := range operatorActions {
		a := &operatorActions[i]
		t.Logf("%s: %d times in Go, %d in SQL", a.name, inGo[i].Load(), bySQL[i].Load())
		if a.do != nil && inGo[i].Load() == 0 || bySQL[i].Load() == 0 {
			t.Errorf("%s was never done in Go, or never in SQL", a.name)
		}
		if a.name == "replay" {
			copies := count(t, db, "select count(*) from broker where key like $1 || '%'", a.topic())
			if again := int(inGo[i].Load() + bySQL[i].Load()); copies < keysOfAction*enqueued+again {
				t.Errorf("%d messages arrived of %d and %d that were replayed", copies, keysOfAction*enqueued, again)
			}
		}
		for n := range keysOfAction {
			checkKey(t, db, a.key(n), enqueued, policy == "hold" && !a.removes || !a.dies)
		}
	}
}

// transientInSQL says what a person at psql would try again: a lock that did not come in time, a deadlock.
func transientInSQL(err error) bool {
	return strings.Contains(err.Error(), "55P03") || strings.Contains(err.Error(), "40P01")
}

// settleActions releases and requeues until everything has been delivered but for what was discarded, which is done to
// all dead messages of one action.
func settleActions(t *testing.T, db *testenv.DB, o *outbox.Operator) {
	t.Helper()
	eventuallyWithin(t, 90*time.Second, "everything to be delivered or discarded", func() bool {
		for i := range operatorActions {
			a := &operatorActions[i]
			for n := range keysOfAction {
				if err := o.Release(t.Context(), channel, a.key(n), ""); err != nil && !errors.Is(err, outbox.ErrNotFound) {
					t.Fatal(err)
				}
			}
			if a.name != "discard" {
				_, err := o.RequeueMany(t.Context(), outbox.RequeueFilter{Topic: a.topic(), Rate: 10_000})
				must(t, err)
				continue
			}
			dead, err := o.Dead(t.Context(), channel, a.topic(), outbox.DeadCursor{}, 1000)
			must(t, err)
			for _, m := range dead {
				if m.DiscardedAt.IsZero() {
					must(t, o.Discard(t.Context(), channel, m.ID, ""))
				}
			}
		}
		time.Sleep(100 * time.Millisecond)
		return count(t, db, `select (select count(*) from commitbox.outbox_message) + (select count(*) from commitbox.outbox_deferred)
			+ (select count(*) from commitbox.outbox_blocked) + (select count(*) from commitbox.outbox_dead where discarded_at is null)`) == 0
	})
}

// checkKey asserts that each message of a key was delivered, or discarded, and that the first copies were in order: all of
// them, or those that never were dead.
func checkKey(t *testing.T, db *testenv.DB, key string, enqueued int, strict bool) {
	t.Helper()
	const lost = `select count(*) from generate_series(0, $2::int - 1) g
		where not exists (select from broker b where b.key = $1 and b.payload = g::text)
		  and not exists (select from commitbox.outbox_dead d where d.key = $1 and convert_from(d.payload, 'UTF8') = g::text and d.discarded_at is not null)`
	const overtaken = `select count(*) from (
			select payload::int as number, max(payload::int) over (order by min(n) rows between unbounded preceding and 1 preceding) as before
			  from broker where key = $1 and ($2 or not exists (select from died d where d.key = $1 and d.payload = broker.payload)) group by payload) x
		 where before > number`
	if n := count(t, db, lost, key, enqueued); n != 0 {
		t.Errorf("key %s: %d of %d messages are lost", key, n, enqueued)
	}
	if n := count(t, db, overtaken, key, strict); n != 0 {
		t.Errorf("key %s: %d of %d messages were overtaken", key, n, cmp.Or(enqueued, 1))
	}
}
