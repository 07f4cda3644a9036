package migrations_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox/internal/testenv"
)

// row makes an inbox row of consumer c.
func row(t *testing.T, db *testenv.DB, id, status, columns, values string) {
	t.Helper()
	exec(t, db, "insert into commitbox.inbox (consumer, message_id, status, attempts, epoch"+columns+") values ('c', $1, $2, 3, 5"+values+")", id, status)
}

const state = `select format('%s %s %s %s %s', status, attempts, epoch, finished_at is null, next_attempt_at <= clock_timestamp())
	from commitbox.inbox where message_id = $1`

func TestInboxRequeue(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	row(t, db, "failed", "failed", ", next_attempt_at", ", now() + interval '1 hour'")
	row(t, db, "dead", "dead", ", finished_at, payload", ", now(), 'p'")
	row(t, db, "completed", "completed", ", finished_at, result", ", now(), 'r'")
	row(t, db, "pending", "pending", ", lease_token, lease_until", ", gen_random_uuid(), now() + interval '1 hour'")
	for id, want := range map[string]string{
		"failed": "needs redelivery", "dead": "runnable", "completed": "", "pending": "", "unknown": "",
	} {
		const call = "select coalesce(commitbox.inbox_requeue('c', $1, 'fixed'), '')"
		if got := one[string](t, db, call, id); got != want {
			t.Errorf("%s: %q, want %q", id, got, want)
		}
	}
	for id, want := range map[string]string{
		"failed": "failed 0 6 t t", "dead": "failed 0 6 t t", "completed": "completed 3 5 f ", "pending": "pending 3 5 t ",
	} {
		if got := one[string](t, db, state, id); got != want {
			t.Errorf("%s is now %q, want %q", id, got, want)
		}
	}
	if payload := one[[]byte](t, db, "select payload from commitbox.inbox where message_id = 'dead'"); string(payload) != "p" {
		t.Errorf("the dead row's payload is now %q", payload)
	}
	targets := one[[]string](t, db, "select array_agg(concat_ws(' ', action, target, reason, who = session_user) order by target) from commitbox.audit")
	if diff := cmp.Diff([]string{"inbox_requeue c/dead fixed t", "inbox_requeue c/failed fixed t"}, targets); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
}

// Each call that says that it requeued has raised the epoch, so that an attempt it overtook is refused.
func TestConcurrentInboxRequeues(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	row(t, db, "m", "dead", ", finished_at", ", now()")
	var done atomic.Int64
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			var answer *string
			if err := db.Pool.QueryRow(t.Context(), "select commitbox.inbox_requeue('c', 'm')").Scan(&answer); err != nil {
				t.Error(err)
			}
			if answer != nil {
				done.Add(1)
			}
		})
	}
	group.Wait()
	if epoch := one[int64](t, db, "select epoch from commitbox.inbox"); epoch != 5+done.Load() || done.Load() == 0 {
		t.Errorf("epoch %d after %d requeues from 5", epoch, done.Load())
	}
	if n := one[int64](t, db, "select count(*) from commitbox.audit"); n != done.Load() {
		t.Errorf("%d audit rows for %d requeues", n, done.Load())
	}
}

// What an operator asks from psql: one message, a page of a list by its cursor, and the counts.
func TestInboxGetListAndStats(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for i, id := range []string{"f1", "f2", "f3"} {
		row(t, db, id, "failed", ", next_attempt_at, received_at, last_error", fmt.Sprintf(", now() + interval '1 hour', now() - interval '%d minutes', 'e'", 30-i))
	}
	row(t, db, "d1", "dead", ", finished_at, payload, headers", `, now() - interval '1 hour', 'p', '{"h": "v"}'`)
	row(t, db, "d2", "dead", ", finished_at", ", now()")
	row(t, db, "c", "completed", ", finished_at, result", ", now(), 'r'")
	row(t, db, "live", "pending", ", lease_token, lease_until", ", gen_random_uuid(), now() + interval '1 hour'")
	row(t, db, "late", "pending", ", lease_token, lease_until", ", gen_random_uuid(), now() - interval '1 hour'")
	for query, want := range map[string]string{
		`select concat_ws(' ', status, attempts, epoch, finished_at is null, due_at is null, encode(payload, 'escape'), headers, encode(result, 'escape'))
			from commitbox.inbox_get('c', 'd1')`: `dead 3 5 f t p {"h": "v"}`,
		`select concat_ws(' ', status, due_at < now(), payload is null) from commitbox.inbox_get('c', 'late')`: "pending t t",
		`select count(*)::text from commitbox.inbox_get('other', 'd1')`:                                        "0",
		`select string_agg(message_id, ' ') from commitbox.inbox_list('c', 'failed', page => 2)`:               "f1 f2",
		`select string_agg(concat_ws(' ', message_id, attempts, finished_at is null, due_at > now(), last_error, payload_kept), ' ')
			from commitbox.inbox_list('c', 'failed', after_at => (select received_at from commitbox.inbox where message_id = 'f2'), after_id => 'f2')`: "f3 3 t t e f",
		`select string_agg(message_id || ' ' || payload_kept, ' ') from commitbox.inbox_list('c', 'dead')`:                            "d1 true d2 false",
		`select string_agg(message_id, ' ') from commitbox.inbox_list('c', 'dead', older => '1 minute')`:                              "d1",
		`select string_agg(message_id, ' ') from commitbox.inbox_list('c', 'completed')`:                                              "c",
		`select string_agg(message_id, ' ' order by message_id) from commitbox.inbox_list('c', 'pending')`:                            "late live",
		`select concat_ws(' ', pending, expired, failed, dead, oldest_seconds between 1795 and 3600) from commitbox.inbox_stats('c')`: "2 1 3 2 t",
		`select concat_ws(' ', pending, expired, failed, dead, oldest_seconds) from commitbox.inbox_stats('other')`:                   "0 0 0 0 0",
	} {
		if got := one[string](t, db, query); got != want {
			t.Errorf("%s:\n%q, want %q", query, got, want)
		}
	}
}

// The advisory lock of a message tells its two parts apart, and is the same in every session.
func TestInboxLock(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if n := one[int](t, db, `select count(distinct commitbox.inbox_lock(c, m))
		from (values ('a', 'bc'), ('ab', 'c'), ('abc', ''), ('', 'abc'), ('bc', 'a'), ('a', 'b')) x (c, m)`); n != 6 {
		t.Errorf("%d locks for 6 messages", n)
	}
	const lock = "select commitbox.inbox_lock('a', 'b')"
	if first := one[int64](t, db, lock); first != one[int64](t, db, lock) {
		t.Error("one message has two locks")
	}
}

func TestInboxBackoffGrowsToItsLimitWithJitter(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for attempts, mean := range map[int]float64{1: 2, 2: 4, 3: 8, 5: 32, 6: 60, 30: 60, 100000: 60} {
		const sample = `select array[min(s), max(s), count(distinct s)::float8] from (
			select extract(epoch from commitbox.inbox_backoff($1::int, 2, 60))::float8 as s from generate_series(1, 200)) x`
		got := one[[]float64](t, db, sample, attempts)
		if got[0] < mean*0.75 || got[1] > mean*1.25 || got[2] < 100 {
			t.Errorf("attempt %d: from %v to %v, %v values; want %v ± 25 %%", attempts, got[0], got[1], got[2], mean)
		}
	}
}
