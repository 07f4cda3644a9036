package migrations_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/internal/testenv"
)

// sqlState returns the code and the constraint of a refusal.
func sqlState(err error) (code, constraint string) {
	var refused *pgconn.PgError
	if errors.As(err, &refused) {
		return refused.Code, refused.ConstraintName
	}
	return fmt.Sprint(err), ""
}

type message struct {
	Channel, Topic string
	Key            *string
	ContentType    *string
	Headers        map[string]string
	Payload        []byte
}

func hot(t *testing.T, db *testenv.DB, id uuid.UUID) message {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `select channel, topic, key, content_type, headers, payload
		from commitbox.outbox_message where message_id = $1`, id)
	if err != nil {
		t.Fatal(err)
	}
	m, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[message])
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestEnqueueStoresTheWholeMessage(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	given, key, contentType := uuid.New(), "k", "text/plain"
	for _, name := range []string{"enqueue", "outbox_enqueue"} {
		call := "select commitbox." + name + `(topic => 't', payload => '\x00ff', key => 'k', headers => '{"a": "1"}',
			channel => 'c', content_type => 'text/plain', message_id => $1)`
		if got := one[uuid.UUID](t, db, call, given); got != given {
			t.Errorf("%s returned %s, given was %s", name, got, given)
		}
		want := message{"c", "t", &key, &contentType, map[string]string{"a": "1"}, []byte{0, 0xff}}
		if diff := cmp.Diff(want, hot(t, db, given)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		exec(t, db, "delete from commitbox.outbox_message")
		id := one[uuid.UUID](t, db, "select commitbox."+name+"('t', '')")
		if diff := cmp.Diff(message{"default", "t", nil, nil, map[string]string{}, []byte{}}, hot(t, db, id)); diff != "" {
			t.Errorf("%s with defaults (-want +got):\n%s", name, diff)
		}
	}
}

func TestEnqueueReadsAnEmptyKeyAsNone(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for _, key := range []string{"''", "null"} {
		id := one[uuid.UUID](t, db, "select commitbox.enqueue('t', '', key => "+key+")")
		if m := hot(t, db, id); m.Key != nil {
			t.Errorf("key %s is stored as %q", key, *m.Key)
		}
	}
}

func TestEnqueueFollowsItsTransaction(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	back := errors.New("back")
	err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), "select commitbox.enqueue('t', '')"); err != nil {
			return err
		}
		return back
	})
	if !errors.Is(err, back) || one[int](t, db, "select count(*) from commitbox.outbox_message") != 0 {
		t.Errorf("a message of a transaction that was rolled back: %v", err)
	}
}

func TestEnqueueRefusesBadInput(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	const badValue, badCheck, isNull = "22023", "23514", "23502"
	for call, want := range map[string]string{
		`('t', '', headers => '{"a": 1}')`:                badValue,
		`('t', '', headers => '{"a": null}')`:             badValue,
		`('t', '', headers => '{"a": {"b": "c"}}')`:       badValue,
		`('t', '', headers => '["a"]')`:                   badValue,
		`('t', '', headers => null)`:                      isNull,
		`(null, '')`:                                      isNull,
		`('t', null)`:                                     isNull,
		`('', '')`:                                        badCheck,
		`(repeat('t', 256), '')`:                          badCheck,
		`('t', '', key => repeat('k', 513))`:              badCheck,
		`('t', '', channel => '')`:                        badCheck,
		`('t', '', channel => repeat('c', 64))`:           badCheck,
		`('t', '', content_type => repeat('c', 256))`:     badCheck,
		`('t', '', key => repeat('é', 257))`:              badCheck,
		`('t', '', deliver_at => 'infinity')`:             badCheck,
		`('t', convert_to(repeat('p', 1048577), 'UTF8'))`: badValue,
		`('t', convert_to(repeat('p', 1048576), 'UTF8'))`: "<nil>",
		`('t', convert_to(repeat('p', 1048577), 'UTF8'), payload_max => 2000000)`:                 "<nil>",
		`('t', '', headers => jsonb_build_object('a', repeat('é', 32768)))`:                       badValue,
		`('t', '', headers => jsonb_build_object('a', repeat('v', 65535)))`:                       "<nil>",
		`('t', '', headers => jsonb_build_object('a', repeat('v', 65536)), headers_max => 70000)`: "<nil>",
		`(repeat('t', 255), '', repeat('k', 512))`:                                                "<nil>",
		`('t', '', channel => repeat('c', 63), headers => '{}')`:                                  "<nil>",
	} {
		_, err := db.Pool.Exec(t.Context(), "select commitbox.enqueue"+call)
		if code, _ := sqlState(err); code != want {
			t.Errorf("enqueue%s: %s, want %s", call, code, want)
		}
	}
}

// bury makes a dead message, and the channel's shard rows, which a relay makes.
func bury(t *testing.T, db *testenv.DB, id uuid.UUID, key string) {
	t.Helper()
	exec(t, db, "insert into commitbox.outbox_channel values ('c') on conflict do nothing")
	exec(t, db, "insert into commitbox.outbox_shard (channel, shard) select 'c', n from generate_series(0, 63) n on conflict do nothing")
	exec(t, db, "select commitbox.enqueue('t', 'p', $2, '{\"a\": \"1\"}', 'c', 'text/plain', $1)", id, key)
	exec(t, db, `with m as (delete from commitbox.outbox_message where message_id = $1 returning *)
		insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, key, topic, content_type, headers, payload, last_error)
		select id, created_at, message_id, shard, 7, channel, key, topic, content_type, headers, payload, 'broken' from m`, id)
}

// hold makes the dead message of a key the head that holds it.
func hold(t *testing.T, db *testenv.DB, id uuid.UUID) {
	t.Helper()
	exec(t, db, `insert into commitbox.outbox_blocked (channel, shard, key, due_at, reason, dead_id)
		select channel, shard, key, 'infinity', 'dead', id from commitbox.outbox_dead where message_id = $1`, id)
}

func requeue(t *testing.T, db *testenv.DB, id uuid.UUID) bool {
	t.Helper()
	return one[bool](t, db, "select commitbox.outbox_requeue('c', $1, 'fixed')", id)
}

func audited(t *testing.T, db *testenv.DB) []string {
	t.Helper()
	return one[[]string](t, db, `select coalesce(array_agg(concat_ws(' ', action, target, reason, who = session_user, at <= now()) order by id), '{}')
		from commitbox.audit`)
}

func TestRequeueOfASkippedMessageGoesToTheEnd(t *testing.T) {
	t.Parallel()
	db, id := testenv.Database(t), uuid.New()
	bury(t, db, id, "k")
	old := one[int64](t, db, "select id from commitbox.outbox_dead")
	epoch := one[int64](t, db, "select sum(epoch)::bigint from commitbox.outbox_shard")
	if !requeue(t, db, id) {
		t.Fatal("not requeued")
	}
	key, contentType := "k", "text/plain"
	want := message{"c", "t", &key, &contentType, map[string]string{"a": "1"}, []byte("p")}
	if diff := cmp.Diff(want, hot(t, db, id)); diff != "" {
		t.Errorf("message (-want +got):\n%s", diff)
	}
	if now := one[int64](t, db, "select id from commitbox.outbox_message"); now <= old {
		t.Errorf("position %d is not behind the old one, %d", now, old)
	}
	if n := one[int](t, db, "select count(*) from commitbox.outbox_dead"); n != 0 {
		t.Error("the message is also dead still")
	}
	if now := one[int64](t, db, "select sum(epoch)::bigint from commitbox.outbox_shard"); now != epoch {
		t.Error("an epoch has changed although nothing was taken from an owner")
	}
	if diff := cmp.Diff([]string{"outbox_requeue c/" + id.String() + " fixed t t"}, audited(t, db)); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
	if requeue(t, db, id) || len(audited(t, db)) != 1 {
		t.Error("requeued twice")
	}
}

func TestRequeueOfAHeldHeadKeepsItsPlace(t *testing.T) {
	t.Parallel()
	db, id := testenv.Database(t), uuid.New()
	bury(t, db, id, "k")
	hold(t, db, id)
	old := one[int64](t, db, "select id from commitbox.outbox_dead")
	if !requeue(t, db, id) {
		t.Fatal("not requeued")
	}
	const deferred = "select format('%s %s %s %s %s', d.id, d.attempts, b.reason, b.due_at <= now(), d.due_at is null)" +
		" from commitbox.outbox_deferred d join commitbox.outbox_blocked b using (channel, shard, key) where d.message_id = $1"
	if got, want := one[string](t, db, deferred, id), fmt.Sprint(old, " 0 retry t t"); got != want {
		t.Errorf("deferred is %s, want %s", got, want)
	}
	const bumped = "select count(*) filter (where epoch > 0) from commitbox.outbox_shard"
	if n := one[int](t, db, bumped); n != 1 {
		t.Errorf("%d epochs have changed, want that of its shard", n)
	}
	if n := one[int](t, db, "select count(*) from commitbox.outbox_dead") + one[int](t, db, "select count(*) from commitbox.outbox_message"); n != 0 {
		t.Error("the message is in another table too")
	}
	if len(audited(t, db)) != 1 {
		t.Errorf("audit: %v", audited(t, db))
	}
}

// Of two dead messages of a held key one holds it; the other one goes to the end.
func TestRequeueBehindAHeldHead(t *testing.T) {
	t.Parallel()
	db, head, next := testenv.Database(t), uuid.New(), uuid.New()
	bury(t, db, head, "k")
	hold(t, db, head)
	bury(t, db, next, "k")
	if !requeue(t, db, next) {
		t.Fatal("not requeued")
	}
	hot(t, db, next)
	if reason := one[string](t, db, "select reason from commitbox.outbox_blocked"); reason != "dead" {
		t.Errorf("the key is now blocked for reason %s", reason)
	}
}

func TestRequeueOfAnUnknownMessage(t *testing.T) {
	t.Parallel()
	db, id := testenv.Database(t), uuid.New()
	bury(t, db, id, "k")
	if requeue(t, db, uuid.New()) {
		t.Error("an unknown id was requeued")
	}
	if one[bool](t, db, "select commitbox.outbox_requeue('other', $1)", id) {
		t.Error("a message of another channel was requeued")
	}
	if len(audited(t, db)) != 0 {
		t.Errorf("audit: %v", audited(t, db))
	}
}

func TestConcurrentRequeuesOfOneMessage(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for i := range 20 {
		id := uuid.New()
		bury(t, db, id, fmt.Sprint("k", i))
		if i%2 == 0 {
			hold(t, db, id)
		}
		var done [4]bool
		var group sync.WaitGroup
		for j := range done {
			group.Go(func() {
				err := db.Pool.QueryRow(t.Context(), "select commitbox.outbox_requeue('c', $1)", id).Scan(&done[j])
				if err != nil {
					t.Error(err)
				}
			})
		}
		group.Wait()
		if n := strings.Count(fmt.Sprint(done), "true"); n != 1 {
			t.Fatalf("%d of 4 requeues say that they did it", n)
		}
		if n := one[int](t, db, `select (select count(*) from commitbox.outbox_message where message_id = $1)
			+ (select count(*) from commitbox.outbox_deferred where message_id = $1)`, id); n != 1 {
			t.Fatalf("the message is there %d times", n)
		}
	}
}

// A server that lost positions draws them again: two dead messages, or two heads, may have one. What is done to one of them
// leaves the other alone.
func TestOperatorActionsTellMessagesOfOnePositionApart(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	a, b := uuid.New(), uuid.New()
	keys := [2]string{"a", one[string](t, db, `select n::text from generate_series(1, 10000) n
		where commitbox.outbox_shard_of(n::text) = commitbox.outbox_shard_of('a') limit 1`)}
	bury(t, db, a, keys[0])
	bury(t, db, b, keys[1])
	exec(t, db, "update commitbox.outbox_dead set id = 1")
	const left = "select count(*) from commitbox.outbox_dead where message_id = $1 and discarded_at is null"

	if !one[bool](t, db, "select commitbox.outbox_discard('c', $1)", a) || one[int](t, db, left, b) != 1 {
		t.Error("the other one was discarded too")
	}
	if !requeue(t, db, a) || one[int](t, db, left, b) != 1 {
		t.Error("the other one went when one was requeued")
	}
	exec(t, db, "delete from commitbox.outbox_message")
	exec(t, db, `insert into commitbox.outbox_blocked (channel, shard, key, due_at, reason)
		select 'c', commitbox.outbox_shard_of(k), k, now(), 'retry' from unnest($1::text[]) k`, keys)
	exec(t, db, `insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, key, topic, headers, payload)
		select 2, now(), gen_random_uuid(), commitbox.outbox_shard_of(k), 'c', k, 't', '{}', '' from unnest($1::text[]) k`, keys)
	exec(t, db, "select commitbox.outbox_skip_head('c', $1)", keys[0])
	if got := one[string](t, db, "select string_agg(key, ' ') from commitbox.outbox_deferred"); got != keys[1] {
		t.Errorf("deferred after one head was skipped: %s, want %s", got, keys[1])
	}
}
