package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// deadMessage makes a dead message without a key at a position.
func deadMessage(t *testing.T, db *testenv.DB, position int64) (id uuid.UUID) {
	t.Helper()
	must(t, db.Pool.QueryRow(t.Context(), `insert into commitbox.outbox_dead (id, created_at, dead_at, message_id, shard, attempts, channel, topic, headers, payload)
		values ($1, now(), now() - interval '1 minute', gen_random_uuid(), 0, 1, 'default', 'test', '{}', '') returning message_id`, position).Scan(&id))
	return id
}

// Every action is in the audit table once, with who, what and why, whether it is called from Go or from SQL; one that did
// nothing is not, and a dry run changes nothing.
func TestEveryOperatorActionIsAudited(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	key := strings.Repeat("k", 512)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := db.Pool.Exec(t.Context(), sql, args...)
		must(t, err)
	}
	exec("select commitbox.outbox_register('default')")
	exec("select commitbox.outbox_sent_days(1, 1)")
	exec(`insert into commitbox.outbox_sent (id, created_at, message_id, shard, channel, topic, headers, payload) values (1, now(), gen_random_uuid(), 0, 'default', 'test', '{}', '')`)
	since, until := time.Now().Add(-time.Hour).UTC(), time.Now().UTC()
	blocked := func() (head uuid.UUID) {
		t.Helper()
		exec("delete from commitbox.outbox_deferred")
		exec("delete from commitbox.outbox_blocked")
		exec("insert into commitbox.outbox_blocked (channel, shard, key, due_at, reason) values ('default', commitbox.outbox_shard_of($1), $1, now() + interval '1 hour', 'retry')", key)
		must(t, db.Pool.QueryRow(t.Context(), `insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, key, topic, headers, payload)
			values (1, now(), gen_random_uuid(), commitbox.outbox_shard_of($1), 'default', $1, 'test', '{}', '') returning message_id`, key).Scan(&head))
		return head
	}
	ctx := t.Context()
	filter := outbox.RequeueFilter{Topic: "test", Since: since, Until: until, Reason: "why"}
	replay := outbox.ReplayFilter{Topic: "test", Since: since, Until: until, Reason: "why"}
	inGo := map[string]func(id uuid.UUID) error{
		"outbox_retry":        func(uuid.UUID) error { return o.Retry(ctx, channel, key, "why") },
		"outbox_park":         func(uuid.UUID) error { return o.Park(ctx, channel, key, "why") },
		"outbox_release":      func(uuid.UUID) error { return o.Release(ctx, channel, key, "why") },
		"outbox_skip_head":    func(uuid.UUID) error { _, err := o.SkipHead(ctx, channel, key, "why"); return err },
		"outbox_requeue":      func(id uuid.UUID) error { return o.Requeue(ctx, channel, id, "why") },
		"outbox_discard":      func(id uuid.UUID) error { return o.Discard(ctx, channel, id, "why") },
		"outbox_requeue_many": func(uuid.UUID) error { return found(o.RequeueMany(ctx, filter)) },
		"outbox_replay":       func(uuid.UUID) error { return found(o.Replay(ctx, replay)) },
	}
	const filtered = "1 messages, since %s, until %s, topic test"
	for action, call := range inGo {
		bySQL := func(id uuid.UUID) error {
			arg, args := "$1", []any{key}
			switch action {
			case "outbox_requeue", "outbox_discard":
				args = []any{id}
			case "outbox_requeue_many":
				arg, args = "$1, $2, $3, 100, false", []any{"test", since, until}
			case "outbox_replay":
				arg, args = "$1, $2, $3, null, '-infinity', 0, 100, false", []any{since, until, "test"}
			}
			_, err := db.Pool.Exec(ctx, fmt.Sprintf("select commitbox.%s('default', %s, 'why')", action, arg), args...)
			return err
		}
		for way, call := range map[string]func(uuid.UUID) error{"Go": call, "SQL": bySQL} {
			exec("delete from commitbox.outbox_dead")
			exec("delete from commitbox.audit")
			head := blocked()
			if action == "outbox_release" {
				exec("update commitbox.outbox_blocked set reason = 'parked', due_at = 'infinity'")
			}
			id := deadMessage(t, db, 1)
			if err := call(id); err != nil {
				t.Errorf("%s in %s: %v", action, way, err)
			}
			target := "default/" + key[:242]
			switch action {
			case "outbox_skip_head":
				target = fmt.Sprintf("default/%s, key %s", head, key)[:250]
			case "outbox_requeue", "outbox_discard":
				target = "default/" + id.String()
			case "outbox_requeue_many", "outbox_replay":
				target = "default/" + fmt.Sprintf(filtered, inSession(t, db, since), inSession(t, db, until))
			}
			if diff := cmp.Diff([]string{action + " " + target + " why, by oneself"}, audited(t, db)); diff != "" {
				t.Errorf("%s in %s (-want +audited):\n%s", action, way, diff)
			}
		}
	}
	exec("delete from commitbox.audit")
	exec("delete from commitbox.outbox_dead")
	exec("delete from commitbox.outbox_message")
	deadMessage(t, db, 1)
	filter.DryRun, replay.DryRun = true, true
	must(t, found(o.RequeueMany(ctx, filter)))
	must(t, found(o.Replay(ctx, replay)))
	exec("select commitbox.outbox_requeue_many('default', dry_run => true), commitbox.outbox_replay('default', $1, $2, dry_run => true)", since, until)
	for _, err := range []error{o.Release(ctx, channel, key, ""), o.Requeue(ctx, channel, uuid.New(), ""), o.Discard(ctx, "other", uuid.New(), "")} {
		if !errors.Is(err, outbox.ErrNotFound) {
			t.Errorf("nothing to do: %v", err)
		}
	}
	if got := audited(t, db); len(got) != 0 {
		t.Errorf("nothing was done, and audited: %v", got)
	}
	if got := tables(t, db); !strings.HasPrefix(got, "hot 0,") || !strings.Contains(got, "dead 1,") {
		t.Errorf("dry runs left %s", got)
	}
}

func found(n int, err error) error {
	if err == nil && n != 1 {
		err = fmt.Errorf("%d messages", n)
	}
	return err
}

// inSession is a time as a session of the database writes it.
func inSession(t *testing.T, db *testenv.DB, at time.Time) (text string) {
	t.Helper()
	must(t, db.Pool.QueryRow(t.Context(), "select $1::timestamptz::text", at).Scan(&text))
	return text
}

func audited(t *testing.T, db *testenv.DB) (rows []string) {
	t.Helper()
	must(t, db.Pool.QueryRow(t.Context(), `select coalesce(array_agg(concat(action, ' ', target, ' ', reason, case when who = session_user then ', by oneself' end) order by id), '{}')
		from commitbox.audit`).Scan(&rows))
	return rows
}

// What an operator reads when something did not work says what was asked, of which message, and what to do.
func TestOperatorErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	id, ctx := uuid.New(), t.Context()
	_, skip := o.SkipHead(ctx, channel, "a", "")
	for want, err := range map[string]error{
		`retry key "a" in channel default: ` + outbox.ErrNotFound.Error() + ": it does not wait for a retry":                                                  o.Retry(ctx, channel, "a", ""),
		`release key "a" in channel default: ` + outbox.ErrNotFound.Error() + ": it is not parked":                                                            o.Release(ctx, channel, "a", ""),
		`skip the head of key "a" in channel default: ` + outbox.ErrNotFound.Error() + ": it is not blocked, or nothing waits in it":                          skip,
		`requeue message ` + id.String() + ` in channel default: ` + outbox.ErrNotFound.Error() + ": no dead message has this id":                             o.Requeue(ctx, channel, id, ""),
		`discard message ` + id.String() + ` in channel default: ` + outbox.ErrNotFound.Error() + ": no dead message has this id, or it is discarded already": o.Discard(ctx, channel, id, ""),
	} {
		if !errors.Is(err, outbox.ErrNotFound) || err.Error() != "outbox: "+want {
			t.Errorf("got %v\nwant outbox: %s", err, want)
		}
	}

	must(t, o.Park(ctx, channel, "a", ""))
	if err := o.Park(ctx, channel, "a", ""); !errors.Is(err, outbox.ErrNotFound) || !strings.HasSuffix(err.Error(), "it is parked already, or a dead message holds it") {
		t.Errorf("parked twice: %v", err)
	}
	shard := begin(t, db)
	_, err := shard.Exec(ctx, "select from commitbox.outbox_shard for update")
	must(t, err)
	if err := o.Release(ctx, channel, "a", ""); err == nil || !strings.Contains(err.Error(), `release key "a" in channel default: nothing was changed, because a relay or another operator held the shard; try again`) {
		t.Errorf("while the shard is held: %v", err)
	}
	must(t, shard.Rollback(ctx))
	must(t, o.Release(ctx, channel, "a", ""))

	proxy := testenv.NewProxy(t, db.URL)
	behind, err := outbox.NewOperator(openPool(t, proxy.URL(t, db.URL)), "")
	must(t, err)
	cut := proxy.CutAfter("commit\x00")
	err = behind.Park(ctx, channel, "b", "")
	<-cut
	if err == nil || !strings.Contains(err.Error(), "whether it was done is not known; the table audit says so") {
		t.Errorf("the answer to COMMIT was lost: %v", err)
	}
	if n := count(t, db, "select count(*) from commitbox.audit where action = 'outbox_park' and target = 'default/b'"); n != 1 {
		t.Errorf("%d audit rows of what was done", n)
	}
}

// An action on many that is stopped says how far it came.
func TestOperatorThatIsStoppedSaysWhere(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	keeping(t, db, 1)
	_, err := db.Pool.Exec(t.Context(), "select commitbox.outbox_sent_days(1, 1), commitbox.outbox_register('default')")
	must(t, err)
	var last time.Time
	must(t, db.Pool.QueryRow(t.Context(), `with kept as (
			insert into commitbox.outbox_sent (sent_at, id, created_at, message_id, shard, channel, topic, headers, payload)
			select statement_timestamp() - interval '1 minute' + g * interval '1 ms', g, now(), gen_random_uuid(), 0, 'default', 't', '{}', '' from generate_series(1, 3) g
			returning sent_at, id)
		select sent_at from kept where id = 2`).Scan(&last))
	for i := range 3 {
		deadMessage(t, db, int64(i+1))
	}
	_, err = db.Pool.Exec(t.Context(), `create function commitbox.stop() returns trigger language plpgsql as $$ begin
			if (select count(*) from commitbox.outbox_message where channel = new.channel) >= 2 then raise exception 'full'; end if; return new; end $$`)
	must(t, err)
	_, err = db.Pool.Exec(t.Context(), "create trigger stop before insert on commitbox.outbox_message for each row execute function commitbox.stop()")
	must(t, err)
	n, err := o.Replay(t.Context(), outbox.ReplayFilter{Since: time.Now().Add(-time.Hour), Rate: 10})
	if err == nil || n != 2 || !strings.Contains(err.Error(), "replay in channel default: stopped after 2 messages, the last one confirmed at "+last.UTC().Format(time.RFC3339Nano)) {
		t.Errorf("replay: %d, %v", n, err)
	}
	_, err = db.Pool.Exec(t.Context(), "delete from commitbox.outbox_message")
	must(t, err)
	n, err = o.RequeueMany(t.Context(), outbox.RequeueFilter{Rate: 10})
	if err == nil || n != 2 || !strings.Contains(err.Error(), "requeue in channel default: stopped after 2 messages; a new call does the others") {
		t.Errorf("requeue: %d, %v", n, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := o.RequeueMany(ctx, outbox.RequeueFilter{}); !errors.Is(err, context.Canceled) {
		t.Errorf("with a context that has ended: %v", err)
	}
}

// Messages that die again are left for the next call: a call ends although the destination refuses all of them.
func TestRequeueManyLeavesWhatDiesAgain(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	p := &recorder{fail: failing(outbox.Permanent(errRefused), 1_000_000, "x")}
	start(t, newRelay(t, db.Pool, p, brisk()))
	for range 20 {
		enqueue(t, db, message("", "x"))
	}
	eventually(t, "20 dead messages", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 20, blocked 0" })
	n, err := o.RequeueMany(t.Context(), outbox.RequeueFilter{Rate: 20})
	if err != nil || n != 20 {
		t.Errorf("requeued %d, %v", n, err)
	}
	eventually(t, "20 dead messages again", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 20, blocked 0" })
}

// An end in the future is now: else what dies again, or is kept again, would be chosen again until that time comes.
func TestAnEndInTheFutureIsNow(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	keeping(t, db, 1)
	p := &recorder{fail: failing(outbox.Permanent(errRefused), 1_000_000, "x")}
	start(t, newRelay(t, db.Pool, p, brisk()))
	enqueue(t, db, message("", "x"), message("", "y"))
	eventually(t, "one dead and one kept message", func() bool {
		return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" && count(t, db, "select count(*) from commitbox.outbox_sent") == 1
	})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	since, until := time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	if n, err := o.RequeueMany(ctx, outbox.RequeueFilter{Until: until, Rate: 2}); err != nil || n != 1 {
		t.Errorf("requeued %d, %v", n, err)
	}
	if n, err := o.Replay(ctx, outbox.ReplayFilter{Since: since, Until: until, Rate: 2}); err != nil || n != 1 {
		t.Errorf("replayed %d, %v", n, err)
	}
}

// A server that lost commits draws positions again: two dead messages may have one, and a page may end between them.
func TestPagesOfDeadMessagesLeaveNoneOut(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	want := map[uuid.UUID]bool{}
	for i := range 9 {
		want[deadMessage(t, db, int64(1+i/3))] = true
	}
	var after outbox.DeadCursor
	for pages := 0; ; pages++ {
		page, err := o.Dead(t.Context(), channel, "", after, 2)
		must(t, err)
		for _, m := range page {
			if !want[m.ID] {
				t.Errorf("message %s at %d is listed twice", m.ID, m.Position)
			}
			delete(want, m.ID)
		}
		if len(page) < 2 {
			break
		}
		after = page[1].Cursor()
		if pages > 9 {
			t.Fatal("the pages do not end")
		}
	}
	if len(want) != 0 {
		t.Errorf("%d messages are on no page", len(want))
	}
}

// The key of messages without one cannot be parked, and a time that ends before it begins selects nothing by mistake.
func TestOperatorRefusesWhatMeansNothing(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	now := time.Now()
	_, many := o.RequeueMany(t.Context(), outbox.RequeueFilter{Since: now, Until: now.Add(-time.Hour)})
	_, replay := o.Replay(t.Context(), outbox.ReplayFilter{Since: now, Until: now.Add(-time.Hour)})
	_, rate := o.Replay(t.Context(), outbox.ReplayFilter{Since: now.Add(-time.Hour), Rate: -1})
	for field, err := range map[string]error{
		"key": o.Park(t.Context(), channel, "", ""), "RequeueFilter.Until": many, "ReplayFilter.Until": replay, "ReplayFilter.Rate": rate,
	} {
		if input := (*commitbox.InputError)(nil); !errors.As(err, &input) || input.Field != field {
			t.Errorf("%s: %v", field, err)
		}
	}
	for _, call := range []string{
		"outbox_park('default', '')", "outbox_park('default', null)", "outbox_replay('default', null, now())", "outbox_replay('default', now(), null)",
	} {
		if _, err := db.Pool.Exec(t.Context(), "select commitbox."+call); err == nil || !strings.Contains(err.Error(), "22023") {
			t.Errorf("%s: %v", call, err)
		}
	}
}
