package outbox_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

func later(key, payload string, in time.Duration) outbox.Message {
	m := message(key, payload)
	m.DeliverAt = time.Now().Add(in)
	return m
}

func TestA7_AScheduledMessageTakesItsPlaceWhenItIsDue(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	due := time.Now().Add(2 * time.Second)
	enqueue(t, db, outbox.Message{Topic: "test", Key: "k", Payload: []byte("in two seconds"), DeliverAt: due}, later("k", "in an hour", time.Hour), message("k", "now"), later("k", "past", -time.Hour))
	eventually(t, "what is due", func() bool { return len(p.payloads("k")) == 2 })
	s, err := o.Stats(t.Context(), channel)
	must(t, err)
	if s.Scheduled != 2 {
		t.Errorf("%d scheduled, want 2", s.Scheduled)
	}
	enqueue(t, db, message("k", "meanwhile")) // nobody waits for a scheduled one of its key
	eventually(t, "the one that was scheduled", func() bool { return len(p.payloads("k")) == 4 })
	if late := time.Since(due); late < 0 || late > 5*time.Second {
		t.Errorf("published %v after its time", late)
	}
	if diff := cmp.Diff([]string{"meanwhile", "in two seconds"}, p.payloads("k")[2:]); diff != "" {
		t.Error(diff)
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_scheduled"); n != 1 {
		t.Errorf("%d still scheduled, want 1", n)
	}
}

func TestScheduledMessagesComeInTheOrderOfTheirTimes(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	var want []string
	for i := range 40 {
		enqueue(t, db, later("k", fmt.Sprint(i), time.Second+time.Duration(i%20)*20*time.Millisecond))
	}
	rows, _ := db.Pool.Query(t.Context(), "select convert_from(payload, 'UTF8') from commitbox.outbox_scheduled order by due_at, id")
	want, err := pgx.CollectRows(rows, pgx.RowTo[string])
	must(t, err)
	for range 3 {
		start(t, newRelay(t, db.Pool, p, brisk()))
	}
	eventually(t, "40 messages", func() bool { return len(p.payloads()) == 40 })
	if diff := cmp.Diff(want, p.payloads("k")); diff != "" {
		t.Error(diff)
	}
}

func TestAScheduledMessageGoesWithItsTransaction(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	tx := begin(t, db)
	_, err := outbox.Enqueue(t.Context(), tx, later("k", "x", time.Hour))
	must(t, err)
	must(t, tx.Rollback(t.Context()))
	if n := count(t, db, "select count(*) from commitbox.outbox_scheduled"); n != 0 {
		t.Errorf("%d scheduled after the rollback", n)
	}
	m := message("k", "x")
	m.DeliverAt = time.Date(12000, 1, 1, 0, 0, 0, 0, time.UTC)
	if _, err := outbox.Enqueue(t.Context(), begin(t, db), m); !errors.As(err, new(*commitbox.InputError)) {
		t.Errorf("the year 12000: %v", err)
	}
}

// keeping makes the channel keep what it sent, for so many days.
func keeping(t *testing.T, db *testenv.DB, days int) {
	t.Helper()
	_, err := db.Pool.Exec(t.Context(), "insert into commitbox.outbox_channel (channel, keep_days) values ('default', $1)", days)
	must(t, err)
}

func TestKeptMessagesAreReplayed(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	keeping(t, db, 3)
	p := &recorder{fail: failing(errRefused, 1, "a1")}
	before := time.Now().Add(-time.Minute)
	start(t, newRelay(t, db.Pool, p, brisk()))
	ids := enqueue(t, db, message("a", "a1"), message("a", "a2"), message("b", "b1"), outbox.Message{Topic: "other", Key: "a", Payload: []byte("a3")})
	eventually(t, "four messages", func() bool { return len(p.payloads()) == 4 })
	eventually(t, "four kept messages", func() bool { return count(t, db, "select count(*) from commitbox.outbox_sent") == 4 })
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })

	f := outbox.ReplayFilter{Since: before, Key: "a", Rate: 1000}
	f.DryRun = true
	if n, err := o.Replay(t.Context(), f); err != nil || n != 3 {
		t.Errorf("dry run: %d, %v", n, err)
	}
	f.DryRun, f.Topic = false, "test"
	if n, err := o.Replay(t.Context(), f); err != nil || n != 2 {
		t.Errorf("replay: %d, %v", n, err)
	}
	eventually(t, "two more", func() bool { return len(p.payloads()) == 6 })
	if diff := cmp.Diff([]string{"a1", "a2", "a3", "a1", "a2"}, p.payloads("a")); diff != "" {
		t.Error(diff)
	}
	if last := p.sent[5]; last.ID != ids[1] || last.Attempt != 1 {
		t.Errorf("the copy has id %v, want %v", last.ID, ids[1])
	}
	if _, err := o.Replay(t.Context(), outbox.ReplayFilter{}); !errors.As(err, new(*commitbox.InputError)) {
		t.Errorf("replay of all time: %v", err)
	}
	if n, err := o.Replay(t.Context(), outbox.ReplayFilter{Since: before, Until: before.Add(time.Second)}); err != nil || n != 0 {
		t.Errorf("replay of a moment before: %d, %v", n, err)
	}
}

func TestReplayTakesEveryMessageOnceAcrossItsSteps(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	keeping(t, db, 1)
	_, err := db.Pool.Exec(t.Context(), "select commitbox.outbox_sent_days(1, 1)")
	must(t, err)
	_, err = db.Pool.Exec(t.Context(), `insert into commitbox.outbox_sent (sent_at, id, created_at, message_id, shard, channel, topic, headers, payload)
		select statement_timestamp() - interval '1 second', g, now(), gen_random_uuid(), 0, 'default', 't', '{}', g::text::bytea from generate_series(1, 1001) g`)
	must(t, err)
	n, err := o.Replay(t.Context(), outbox.ReplayFilter{Since: time.Now().Add(-time.Hour), Rate: 100_000})
	if err != nil || n != 1001 {
		t.Errorf("replayed %d, %v", n, err)
	}
	if n := count(t, db, "select count(distinct message_id) from commitbox.outbox_message"); n != 1001 {
		t.Errorf("%d different messages in hot", n)
	}
}

func TestH9_DaysComeAndGoWithoutStoppingTheRelay(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	keeping(t, db, 2)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := db.Pool.Exec(t.Context(), sql, args...)
		must(t, err)
	}
	exec(`create table commitbox.outbox_sent_20200101 partition of commitbox.outbox_sent for values from ('2020-01-01 00:00+00') to ('2020-01-02 00:00+00')`)
	exec(`create table commitbox.outbox_sent_20200102 partition of commitbox.outbox_sent for values from ('2020-01-02 00:00+00') to ('2020-01-03 00:00+00')`)
	days := func() (made, dropped int) {
		t.Helper()
		must(t, db.Pool.QueryRow(t.Context(), "select made, dropped from commitbox.outbox_sent_days(7, 2)").Scan(&made, &dropped))
		return made, dropped
	}
	// A reader of an old day: the drop gives up after 40 ms.
	reader := begin(t, db)
	_, err := reader.Exec(t.Context(), "select count(*) from commitbox.outbox_sent_20200101")
	must(t, err)
	started := time.Now()
	if made, dropped := days(); made != 8 || dropped != 1 {
		t.Errorf("with a reader of one of two old days: made %d, dropped %d, want 8 and 1", made, dropped)
	}
	if took := time.Since(started); took > 5*time.Second {
		t.Errorf("took %v", took)
	}
	must(t, reader.Rollback(t.Context()))
	if made, dropped := days(); made != 0 || dropped != 1 {
		t.Errorf("without: made %d, dropped %d, want 0 and 1", made, dropped)
	}
	if made, dropped := days(); made+dropped != 0 {
		t.Errorf("again: made %d, dropped %d", made, dropped)
	}
	// A day is dropped while the relay confirms.
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	for i := range 200 {
		enqueue(t, db, message("", fmt.Sprint(i)))
		if i%20 == 0 {
			exec(fmt.Sprintf(`create table commitbox.outbox_sent_201901%02d (like commitbox.outbox_sent including all)`, i/20+1))
			exec(fmt.Sprintf(`alter table commitbox.outbox_sent attach partition commitbox.outbox_sent_201901%02d for values from ('2019-01-%02d 00:00+00') to ('2019-01-%02d 00:00+00')`, i/20+1, i/20+1, i/20+2))
			days()
		}
	}
	eventually(t, "200 kept messages", func() bool { return count(t, db, "select count(*) from commitbox.outbox_sent") == 200 })
	if n := len(p.payloads()); n != 200 {
		t.Errorf("%d publishes of 200 messages", n)
	}
}

// Days that are read, however many, are left alone after one short wait, in which relays may stand behind the drop.
func TestH9_DaysThatAreReadAreLeftToTheNextCall(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	const days = 30
	for day := range days {
		_, err := db.Pool.Exec(t.Context(), fmt.Sprintf(`create table commitbox.outbox_sent_201901%02d partition of commitbox.outbox_sent
			for values from ('2019-01-%02d 00:00+00') to ('2019-01-%02d 00:00+00')`, day+1, day+1, day+2))
		must(t, err)
	}
	reader := begin(t, db)
	_, err := reader.Exec(t.Context(), "select from commitbox.outbox_sent")
	must(t, err)
	var dropped int
	const drop = "select dropped from commitbox.outbox_sent_days(0, 0)"
	started := time.Now()
	must(t, db.Pool.QueryRow(t.Context(), drop).Scan(&dropped))
	if took := time.Since(started); dropped != 0 || took > days*40*time.Millisecond {
		t.Errorf("with a reader of %d old days: %d dropped in %v", days, dropped, took)
	}
	must(t, reader.Rollback(t.Context()))
	tx := begin(t, db)
	var before, after string
	must(t, tx.QueryRow(t.Context(), "show lock_timeout").Scan(&before))
	must(t, tx.QueryRow(t.Context(), drop).Scan(&dropped))
	must(t, tx.QueryRow(t.Context(), "show lock_timeout").Scan(&after))
	if dropped != days || after != before {
		t.Errorf("without: %d dropped, and lock_timeout is now %s instead of %s", dropped, after, before)
	}
}

// What is confirmed in one statement is kept in the order in which it was sent, whatever places the rows had.
func TestKeptMessagesOfAKeyAreReplayedInTheirOrder(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	keeping(t, db, 1)
	_, err := db.Pool.Exec(t.Context(), `insert into commitbox.outbox_message (id, message_id, channel, key, topic, payload)
		select 101 - g, gen_random_uuid(), 'default', 'k', 't', convert_to((101 - g)::text, 'UTF8') from generate_series(1, 100) g`)
	must(t, err)
	must(t, db.Pool.QueryRow(t.Context(), "select setval('commitbox.outbox_seq', 100)").Scan(new(int64)))
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "100 kept messages", func() bool { return count(t, db, "select count(*) from commitbox.outbox_sent") == 100 })
	first := p.payloads("k")
	n, err := o.Replay(t.Context(), outbox.ReplayFilter{Since: time.Now().Add(-time.Hour), Rate: 10_000})
	if err != nil || n != 100 {
		t.Fatalf("replayed %d, %v", n, err)
	}
	eventually(t, "their copies", func() bool { return len(p.payloads("k")) == 200 })
	if diff := cmp.Diff(first, p.payloads("k")[100:]); diff != "" {
		t.Errorf("order (-first +again):\n%s", diff)
	}
}

// Days come and go by the function only: a relay's role can neither make nor drop one itself, and there is no partition for
// what has no day.
func TestH9_DaysAreMadeByTheFunctionOnly(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	ctx := t.Context()
	_, err := db.Pool.Exec(ctx, `create table commitbox.outbox_sent_20200101 partition of commitbox.outbox_sent for values from ('2020-01-01 00:00+00') to ('2020-01-02 00:00+00')`)
	must(t, err)
	tx := begin(t, db)
	for _, sql := range []string{"create role days_of_a_relay", "select commitbox.grant_rights('relay', 'days_of_a_relay')", "set local role days_of_a_relay"} {
		_, err := tx.Exec(ctx, sql)
		must(t, err)
	}
	const insert = `insert into commitbox.outbox_sent (sent_at, id, created_at, message_id, shard, channel, topic, headers, payload)
		values (statement_timestamp() + $1 * interval '1 day', 1, now(), gen_random_uuid(), 0, 'default', 't', '{}', '')`
	attempt := func(sql string, args ...any) (code string) {
		t.Helper()
		inner, err := tx.Begin(ctx)
		must(t, err)
		_, err = inner.Exec(ctx, sql, args...)
		if refused := (*pgconn.PgError)(nil); errors.As(err, &refused) {
			code = refused.Code
		}
		must(t, inner.Rollback(ctx))
		return code
	}
	const notAllowed, noPartition = "42501", "23514"
	for sql, want := range map[string]string{
		"create table commitbox.outbox_sent_x partition of commitbox.outbox_sent default":                                          notAllowed,
		"create table commitbox.outbox_sent_x partition of commitbox.outbox_sent for values from ('2021-01-01') to ('2021-01-02')": notAllowed,
		"drop table commitbox.outbox_sent_20200101":                                                                                notAllowed,
		"alter table commitbox.outbox_sent detach partition commitbox.outbox_sent_20200101":                                        notAllowed,
		"delete from commitbox.outbox_sent":                                                                                        notAllowed,
	} {
		if code := attempt(sql); code != want {
			t.Errorf("%s: %q, want %s", sql, code, want)
		}
	}
	if code := attempt(insert, 0); code != noPartition {
		t.Errorf("a message of a day that was not made: %q, want %s", code, noPartition)
	}
	var made, dropped int
	must(t, tx.QueryRow(ctx, "select made, dropped from commitbox.outbox_sent_days(7, 1)").Scan(&made, &dropped))
	if made != 8 || dropped != 1 {
		t.Errorf("the function made %d and dropped %d, want 8 and 1", made, dropped)
	}
	for day, want := range map[int]string{0: "", 7: "", 8: noPartition} {
		if code := attempt(insert, day); code != want {
			t.Errorf("a message of day %d: %q, want %q", day, code, want)
		}
	}
	must(t, tx.Rollback(ctx))

	keeping(t, db, 1)
	start(t, newRelay(t, db.Pool, &recorder{}, brisk()))
	eventually(t, "a relay to make today and 7 days ahead", func() bool {
		return count(t, db, `select count(*) from pg_inherits i join pg_class c on c.oid = i.inhrelid where i.inhparent = 'commitbox.outbox_sent'::regclass
			and c.relname between 'outbox_sent_' || to_char(now() at time zone 'UTC', 'YYYYMMDD') and 'outbox_sent_' || to_char(now() at time zone 'UTC' + interval '7 days', 'YYYYMMDD')`) == 8
	})
}

// While a reader keeps an old day from being dropped for as long as it likes, and the drop is tried again and again, a relay
// goes on confirming.
func TestH9_ADropThatCannotBeDoneStopsNoRelay(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	keeping(t, db, 1)
	_, err := db.Pool.Exec(t.Context(), `create table commitbox.outbox_sent_20200101 partition of commitbox.outbox_sent for values from ('2020-01-01 00:00+00') to ('2020-01-02 00:00+00')`)
	must(t, err)
	reader := begin(t, db)
	_, err = reader.Exec(t.Context(), "select from commitbox.outbox_sent_20200101")
	must(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var group sync.WaitGroup
	var tries, gone atomic.Int64
	group.Go(func() {
		for ctx.Err() == nil {
			var dropped int64
			if err := db.Pool.QueryRow(ctx, "select dropped from commitbox.outbox_sent_days(7, 1)").Scan(&dropped); err != nil && ctx.Err() == nil {
				t.Errorf("drop: %v", err)
			}
			tries.Add(1)
			gone.Add(dropped)
		}
	})
	defer group.Wait()
	defer cancel()
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	for i := range 50 {
		enqueue(t, db, message("", fmt.Sprint(i)))
	}
	eventually(t, "50 confirmed messages", func() bool { return len(p.payloads()) == 50 && tables(t, db) == settled })
	eventually(t, "three tries to drop", func() bool { return tries.Load() >= 3 })
	if gone.Load() != 0 || len(p.payloads()) != 50 {
		t.Errorf("%d days dropped while one was read, %d publishes of 50 messages", gone.Load(), len(p.payloads()))
	}
	must(t, reader.Rollback(t.Context()))
	eventually(t, "the drop", func() bool { return gone.Load() == 1 })
}

// A psql session and a Go program enqueue for one key at the same time, and serialise their transactions by a row: order holds.
func TestPsqlAndGoShareAKey(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	_, err := db.Pool.Exec(t.Context(), "create table account as select 0 as version")
	must(t, err)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	fromPsql := psql(t, db)
	const each = 60
	var group sync.WaitGroup
	group.Go(func() {
		for range each {
			err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
				var version int
				if err := tx.QueryRow(t.Context(), "update account set version = version + 1 returning version").Scan(&version); err != nil {
					return err
				}
				_, err := outbox.Enqueue(t.Context(), tx, message("k", fmt.Sprint(version)))
				return err
			})
			if err != nil {
				t.Errorf("the Go program: %v", err)
				return
			}
		}
	})
	for range each {
		fromPsql(`begin; update account set version = version + 1;
			select commitbox.enqueue('psql', convert_to(version::text, 'UTF8'), 'k') from account; commit;`)
	}
	group.Wait()
	var want []string
	for i := range 2 * each {
		want = append(want, fmt.Sprint(i+1))
	}
	eventually(t, "120 messages", func() bool { return len(p.payloads()) == 2*each })
	if diff := cmp.Diff(want, p.payloads("k")); diff != "" {
		t.Error(diff)
	}
}

// A message for later from psql is one for later, and has its place when it is due.
func TestPsqlSchedules(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	fromPsql := psql(t, db)
	fromPsql("select commitbox.enqueue('t', 'never', 'k', deliver_at => now() + interval '1 day');")
	fromPsql("select commitbox.enqueue('t', 'later', 'k', deliver_at => now() + interval '1 s');")
	fromPsql("select commitbox.enqueue('t', 'now', 'k');")
	eventually(t, "two messages", func() bool { return len(p.payloads()) == 2 })
	if diff := cmp.Diff([]string{"now", "later"}, p.payloads("k")); diff != "" {
		t.Error(diff)
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_scheduled"); n != 1 {
		t.Errorf("%d messages wait, want 1", n)
	}
}

// psql starts a session and returns what runs a statement in it that answers one line.
func psql(t *testing.T, db *testenv.DB) func(statement string) (answer string) {
	t.Helper()
	dir, err := devserver.PostgresBinDir(0)
	if err != nil {
		t.Skipf("no psql: %v", err)
	}
	cmd := exec.Command(filepath.Join(dir, "psql"), "-XqAt", "-v", "ON_ERROR_STOP=1", db.URL)
	if _, err := os.Stat(cmd.Path); err != nil {
		t.Skipf("no psql: %v", err)
	}
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	cmd.Stderr = os.Stderr
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = in.Close()
		if err := cmd.Wait(); err != nil {
			t.Errorf("psql: %v", err)
		}
	})
	lines := bufio.NewScanner(out)
	return func(statement string) string {
		t.Helper()
		if _, err := fmt.Fprintln(in, statement); err != nil || !lines.Scan() {
			t.Fatalf("psql ended: %v", errors.Join(err, lines.Err()))
		}
		return lines.Text()
	}
}
