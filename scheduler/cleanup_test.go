package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/rights"
	"github.com/commitbox/commitbox/scheduler"
)

var quiet = slog.New(slog.DiscardHandler)

// rooms is a database with rows of every kind, some of which are over.
type rooms struct {
	*testenv.DB
	t *testing.T
}

func newRooms(t *testing.T) *rooms {
	t.Helper()
	t.Parallel()
	return &rooms{testenv.Database(t), t}
}

func (r *rooms) exec(sql string, args ...any) {
	r.t.Helper()
	if _, err := r.Pool.Exec(context.Background(), sql, args...); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rooms) count(sql string, args ...any) (n int) {
	r.t.Helper()
	if err := r.Pool.QueryRow(context.Background(), sql, args...).Scan(&n); err != nil {
		r.t.Fatal(err)
	}
	return n
}

func (r *rooms) cleanup(pool *pgxpool.Pool, cfg scheduler.CleanupConfig) *scheduler.Cleanup {
	r.t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = quiet
	}
	if cfg.Pause == 0 {
		cfg.Pause = time.Microsecond
	}
	c, err := scheduler.NewCleanup(pool, cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *rooms) clean(c *scheduler.Cleanup) scheduler.CleanupReport {
	r.t.Helper()
	report, err := c.RunOnce(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	return report
}

// fill makes rows of two consumers. The ids say what has to become of them: gone, dead or kept. The retentions are those that the
// migration gives to every consumer: 7 days, 30 days for dead ones; failed ones are abandoned after 7 days.
func (r *rooms) fill() {
	r.t.Helper()
	const rows = `
		insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until, received_at, finished_at, next_attempt_at, last_error)
		select c, id || ' ' || n, status, 1, 1,
		       case when status = 'pending' then gen_random_uuid() end,
		       case when status = 'pending' then clock_timestamp() - make_interval(days => age) end,
		       clock_timestamp() - make_interval(days => greatest(age, received)),
		       case when status in ('completed', 'dead') then clock_timestamp() - make_interval(days => age) end,
		       case when status = 'failed' then clock_timestamp() - make_interval(days => age) end, 'broken'
		  from unnest(array['a', 'b']) c, (values
		    ('gone completed', 'completed', 8, 0, 23), ('kept completed', 'completed', 6, 0, 5),
		    ('gone dead', 'dead', 31, 0, 11), ('kept dead', 'dead', 29, 0, 4),
		    ('dead failed', 'failed', 8, 0, 12), ('kept failed', 'failed', 6, 100, 6),
		    ('kept expired', 'pending', 100, 0, 3), ('kept leased', 'pending', -1, 100, 2)
		  ) v (id, status, age, received, rows), generate_series(1, rows) n;
		insert into commitbox.inbox_step (consumer, message_id, name, epoch) select consumer, message_id, 's', 1 from commitbox.inbox where status <> 'failed';
		insert into commitbox.outbox_channel (channel) values ('default');
		select commitbox.outbox_register('default');
		insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, topic, headers, payload, dead_at, discarded_at, discarded_by)
		select n, now() - interval '1 year', gen_random_uuid(), 0, 1, 'default', case when n > 20 then 'kept' when n > 10 then 'kept discarded' else 'gone' end, '{}', '',
		       now() - interval '1 year', case when n <= 20 then now() - make_interval(days => case when n > 10 then 29 else 31 end) end, case when n <= 20 then 'somebody' end
		  from generate_series(1, 30) n;
		insert into commitbox.outbox_message (created_at, message_id, channel, topic, payload)
		select now() - interval '1 year', gen_random_uuid(), 'default', 'kept', '' from generate_series(1, 7);
		insert into commitbox.outbox_blocked (channel, shard, key, due_at, reason) select 'default', commitbox.outbox_shard_of('k'), 'k', 'infinity', 'parked';
		insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, key, topic, headers, payload, deferred_at)
		select n, now() - interval '1 year', gen_random_uuid(), commitbox.outbox_shard_of('k'), 'default', 'k', 'kept', '{}', '', now() - interval '1 year' from generate_series(1, 5) n;
		insert into commitbox.outbox_scheduled (due_at, message_id, channel, topic, payload) select now() - interval '1 year', gen_random_uuid(), 'default', 'kept', '' from generate_series(1, 4);
		insert into commitbox.outbox_relay (owner, channel, lease_until) values (gen_random_uuid(), 'default', now() - interval '2 hours'), (gen_random_uuid(), 'default', now() + interval '1 minute');
		insert into commitbox.inbox_replica (replica, version, seen_at) values ('old', 1, now() - interval '2 hours'), ('new', 1, now())`
	for _, table := range []string{"inbox", "inbox_replica", "outbox_message", "outbox_relay", "outbox_deferred", "outbox_blocked", "outbox_shard", "outbox_dead", "outbox_scheduled", "outbox_channel", "audit"} {
		r.exec("delete from commitbox." + table)
	}
	r.exec(rows)
}

var wantReport = scheduler.CleanupReport{
	Finished: true, Completed: 46, Dead: 22, Abandoned: 24, Discarded: 10, Gone: 2, DaysMade: 8, Expired: 6,
}

// left says what is there: how many rows of each kind and state.
func (r *rooms) left() map[string]int {
	r.t.Helper()
	rows, err := r.Pool.Query(context.Background(), `
		select what || ' is ' || state, count(*) from (
			select substring(message_id from '^\w+ \w+'), status from commitbox.inbox
			union all select 'step', '' from commitbox.inbox_step
			union all select topic || ' dead', '' from commitbox.outbox_dead
			union all select topic || ' message', '' from commitbox.outbox_message
			union all select topic || ' deferred', '' from commitbox.outbox_deferred
			union all select topic || ' scheduled', '' from commitbox.outbox_scheduled
			union all select 'relay', '' from commitbox.outbox_relay
			union all select 'replica', replica from commitbox.inbox_replica) x (what, state) group by 1`)
	if err != nil {
		r.t.Fatal(err)
	}
	left := map[string]int{}
	var what string
	var n int
	if _, err := pgx.ForEachRow(rows, []any{&what, &n}, func() error { left[what] = n; return nil }); err != nil {
		r.t.Fatal(err)
	}
	return left
}

var wantLeft = map[string]int{
	"kept completed is completed": 10, "kept dead is dead": 8, "dead failed is dead": 24, "kept failed is failed": 12,
	"kept expired is pending": 6, "kept leased is pending": 4, "step is ": 28,
	"kept dead is ": 10, "kept discarded dead is ": 10, "kept message is ": 7, "kept deferred is ": 5, "kept scheduled is ": 4,
	"relay is ": 1, "replica is new": 1,
}

func (r *rooms) checkLeft() {
	r.t.Helper()
	if diff := cmp.Diff(wantLeft, r.left()); diff != "" {
		r.t.Errorf("left (-want +got):\n%s", diff)
	}
}

func TestP13_OnlyWhatIsOverIsRemoved(t *testing.T) {
	for _, batch := range []int{1, 7, 1000} {
		t.Run(fmt.Sprint(batch), func(t *testing.T) {
			r := newRooms(t)
			r.fill()
			c := r.cleanup(r.Pool, scheduler.CleanupConfig{Batch: batch})
			got := r.clean(c)
			got.Took = 0
			if diff := cmp.Diff(wantReport, got); diff != "" {
				t.Errorf("report (-want +got):\n%s", diff)
			}
			r.checkLeft()
			got = r.clean(c)
			got.Took = 0
			if diff := cmp.Diff(scheduler.CleanupReport{Finished: true, Expired: 6}, got); diff != "" {
				t.Errorf("second report (-want +got):\n%s", diff)
			}
		})
	}
}

// A message that nobody tries again is dead first, for all to see, and ages from then on. What was on its way to it is refused.
func TestF19_FailedRowsBecomeDeadFirst(t *testing.T) {
	r := newRooms(t)
	r.fill()
	box, err := inbox.New(r.Pool, inbox.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	r.clean(r.cleanup(r.Pool, scheduler.CleanupConfig{}))
	e, err := box.Get(t.Context(), inbox.ID{Consumer: "a", Message: "dead failed 1"})
	if err != nil || e.Status != inbox.StatusDead || e.LastError != "abandoned: nobody tried it again; broken" || time.Since(e.FinishedAt) > time.Minute {
		t.Errorf("%+v, %v", e, err)
	}
	if n := r.count(`select count(*) from commitbox.inbox where status = 'dead' and message_id like 'dead failed%' and epoch = 2`); n != 24 {
		t.Errorf("%d rows have a new epoch", n)
	}
	if n := r.count(`select count(*) from commitbox.audit where action = 'inbox_abandon' and target in ('a', 'b')`); n != 2 {
		t.Errorf("%d lines in audit", n)
	}
	if _, err := box.Requeue(t.Context(), inbox.ID{Consumer: "a", Message: "dead failed 1"}, "try again"); err != nil {
		t.Error(err)
	}
}

// Each consumer's own policy counts; a column that it leaves out is inherited.
func TestF19_EachConsumerHasItsRetention(t *testing.T) {
	r := newRooms(t)
	r.fill()
	r.exec(`select commitbox.inbox_policy_set('b', '{"retention": "400 days", "dead_retention": "20 days", "abandon_after": "5 days"}')`)
	got := r.clean(r.cleanup(r.Pool, scheduler.CleanupConfig{}))
	if got.Completed != 23 || got.Dead != 11+11+4 || got.Abandoned != 12+12+6 {
		t.Errorf("%+v", got)
	}
}

// A retention that is meant as for ever keeps the rows, and is no error of every run.
func TestF19_ForEverIsARetention(t *testing.T) {
	r := newRooms(t)
	r.fill()
	r.exec(`select commitbox.inbox_policy_set('b', '{"retention": "100000 years", "dead_retention": "100000 years", "abandon_after": "100000 years"}')`)
	got := r.clean(r.cleanup(r.Pool, scheduler.CleanupConfig{}))
	if !got.Finished || got.Completed != 23 || got.Dead != 11 || got.Abandoned != 12 {
		t.Errorf("%+v", got)
	}
}

// Rows that a person wrote past the checks are reported, and nothing that depends on them is removed.
func TestF19_RowsWrittenByHandAreReported(t *testing.T) {
	r := newRooms(t)
	r.fill()
	r.exec(`alter table commitbox.inbox_policy disable trigger all; alter table commitbox.inbox_policy drop constraint inbox_policy_retention`)
	r.exec(`insert into commitbox.inbox_policy (consumer, retention, retry_horizon, version, updated_at, updated_by) values ('a', '1 hour', '2 hours', 1, now(), '')`)
	r.exec(`update commitbox.inbox set finished_at = 'infinity' where consumer = 'b' and message_id = 'gone completed 1'`)
	got := r.clean(r.cleanup(r.Pool, scheduler.CleanupConfig{}))
	if len(got.Odd) != 2 || !strings.Contains(got.Odd[0], `consumer "a"`) || !strings.Contains(got.Odd[1], `1 rows of consumer "b" ended in the future`) {
		t.Errorf("%q", got.Odd)
	}
	if got.Completed != 22 || got.Dead != 11 || got.Abandoned != 12 {
		t.Errorf("%+v", got)
	}
}

// planned explains the removal of a batch behind a time.
func (r *rooms) planned(pool *pgxpool.Pool, after time.Time) string {
	r.t.Helper()
	rows, err := pool.Query(context.Background(), "explain (analyze, buffers, costs off, timing off, summary off) "+db.CleanupEnded,
		after, "a", "completed", time.Now().Add(time.Hour), float64(7*24*60*60), 500)
	if err != nil {
		r.t.Fatal(err)
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.Join(lines, "\n")
}

func (r *rooms) completed(n int) {
	r.exec(`insert into commitbox.inbox (consumer, message_id, status, finished_at)
		select 'a', 'm' || n, 'completed', clock_timestamp() - make_interval(days => 8, secs => n) from generate_series(1, $1::int) n`, n)
	r.exec(`vacuum analyze commitbox.inbox`)
}

func TestF20_RetentionIsAnIndexConditionAndRowsAreFoundByCtid(t *testing.T) {
	r := newRooms(t)
	r.completed(10_000)
	for who, pool := range map[string]*pgxpool.Pool{"the owner": r.Pool, "a role that cleans up": r.as("cleanup")} {
		plan := r.planned(pool, time.Time{})
		for _, want := range []string{"Tid Scan on inbox", "Index Scan using inbox_ended_at", "finished_at < (LEAST(statement_timestamp()"} {
			if !strings.Contains(plan, want) {
				t.Errorf("%s: no %q in\n%s", who, want, plan)
			}
		}
		if strings.Contains(plan, "Sort") || strings.Contains(plan, "Rows Removed by Filter") {
			t.Errorf("%s:\n%s", who, plan)
		}
	}
}

// as returns a pool that works as a role with the rights of a kind.
func (r *rooms) as(kind string) *pgxpool.Pool {
	r.t.Helper()
	role := strings.Replace(r.Name, "test", kind, 1)
	r.exec("create role " + role)
	r.t.Cleanup(func() { r.exec("drop owned by " + role + "; drop role " + role) })
	r.exec("select commitbox.grant_rights($1, $2)", kind, role)
	cfg := r.Pool.Config()
	cfg.ConnConfig.RuntimeParams["role"] = role
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(pool.Close)
	return pool
}

// A role that lacks a right hears which, as the statement that gives it, from the run itself.
func TestB88_ARunNamesTheRightThatIsMissing(t *testing.T) {
	r := newRooms(t)
	r.fill()
	pool := r.as("cleanup")
	r.exec("revoke select on commitbox.inbox_policies from " + strings.Replace(r.Name, "test", "cleanup", 1))
	report, err := r.cleanup(pool, scheduler.CleanupConfig{}).RunOnce(t.Context())
	var missing *rights.MissingError
	if !errors.As(err, &missing) || len(missing.Missing) != 1 || !strings.HasPrefix(missing.Missing[0], "grant select on table commitbox.inbox_policies to ") {
		t.Errorf("%v", err)
	}
	if report.Completed != 0 || report.Discarded != 10 {
		t.Errorf("what does not need it is done all the same: %+v", report)
	}
}

// While an old snapshot keeps vacuum away, a run's later batches do not step over what the first ones removed.
func TestB53_AnOldSnapshotDoesNotSlowLaterBatches(t *testing.T) {
	r := newRooms(t)
	r.completed(10_000)
	old, err := r.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
	if err != nil {
		t.Fatal(err)
	}
	defer old.Rollback(context.Background())
	if _, err := old.Exec(t.Context(), `select 1`); err != nil {
		t.Fatal(err)
	}
	first := buffers(t, r.planned(r.Pool, time.Time{}))
	r.exec(`delete from commitbox.inbox where message_id in (select 'm' || n from generate_series(2000, 9500) n)`)
	var reached time.Time
	if err := r.Pool.QueryRow(t.Context(), `select clock_timestamp() - make_interval(days => 8, secs => 1999)`).Scan(&reached); err != nil {
		t.Fatal(err)
	}
	last := buffers(t, r.planned(r.Pool, reached))
	if last > 2*first {
		t.Errorf("%d buffers for the first batch, %d for a later one", first, last)
	}
}

// buffers adds up what the whole plan has touched: the first line of buffers is the root's.
func buffers(t *testing.T, plan string) (n int) {
	t.Helper()
	_, after, found := strings.Cut(plan, "shared hit=")
	if _, err := fmt.Sscanf(after, "%d", &n); !found || err != nil {
		t.Fatal(plan)
	}
	return n
}

// A limit that is too short for a batch does not stop the removal: batches get smaller until they fit, and what they did stays.
func TestB50_ADeadlineThatAlwaysFiresStopsNothing(t *testing.T) {
	r := newRooms(t)
	r.completed(400)
	r.exec(`create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.002); return old; end $$`)
	r.exec(`create trigger slow before delete on commitbox.inbox for each row execute function slow()`)
	c := r.cleanup(r.Pool, scheduler.CleanupConfig{Batch: 5000, StatementTimeout: 50 * time.Millisecond, Budget: 300 * time.Millisecond})
	runs := 0
	for left := 400; left > 0; runs++ {
		r.clean(c)
		now := r.count(`select count(*) from commitbox.inbox`)
		if now >= left {
			t.Fatalf("run %d made no progress at %d rows", runs, left)
		}
		left = now
	}
	if runs < 2 {
		t.Errorf("%d run: the budget was not kept", runs)
	}
}

// However short the budget is, every consumer gets its turn.
func TestB50_NoConsumerWaitsForTheEndOfAnother(t *testing.T) {
	r := newRooms(t)
	r.exec(`insert into commitbox.inbox (consumer, message_id, status, finished_at)
		select c, 'm' || n, 'completed', now() - interval '8 days' from unnest(array['a', 'b', 'c']) c, generate_series(1, 50) n`)
	c := r.cleanup(r.Pool, scheduler.CleanupConfig{Batch: 10, Budget: time.Nanosecond})
	const consumers, kinds = 3, 3
	for range consumers*kinds + 2 {
		if got := r.clean(c); got.Finished {
			t.Fatalf("%+v", got)
		}
	}
	if n := r.count(`select count(distinct consumer) from (select consumer from commitbox.inbox group by 1 having count(*) < 50) x`); n != consumers {
		t.Errorf("rows of %d consumers were removed", n)
	}
}

// Twenty cleaners at once, some of which give up the lead at once: nobody waits, nobody deadlocks, everything goes once.
func TestB51_TwentyCleanersAtOnce(t *testing.T) {
	for name, through := range map[string]func(r *rooms) string{
		"direct":               func(r *rooms) string { return r.URL },
		"a transaction pooler": func(r *rooms) string { return r.Bouncer(r.t) + "&default_query_exec_mode=cache_describe" },
	} {
		t.Run(name, func(t *testing.T) {
			r := newRooms(t)
			const rows, cleaners = 2_000, 20
			r.completed(rows)
			url := through(r)
			reports := make([]scheduler.CleanupReport, cleaners)
			// Without one leader they would take all of the pooler's connections and wait for each other.
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			var group sync.WaitGroup
			for i := range reports {
				pool, err := pgxpool.New(t.Context(), url)
				if err != nil {
					t.Fatal(err)
				}
				defer pool.Close()
				c := r.cleanup(pool, scheduler.CleanupConfig{Batch: 100})
				group.Go(func() {
					var err error
					if reports[i], err = c.RunOnce(ctx); err != nil {
						t.Error(err)
					}
				})
			}
			group.Wait()
			removed, skipped := int64(0), 0
			for _, report := range reports {
				removed += report.Completed
				if report.Skipped {
					skipped++
				}
			}
			if removed != rows || r.count(`select count(*) from commitbox.inbox`) != 0 {
				t.Errorf("%d rows removed", removed)
			}
			t.Logf("%d cleaners skipped their turn", skipped)
			if skipped == 0 {
				t.Error("no cleaner skipped its turn")
			}
		})
	}
}

// A leader that has died is no obstacle for the next one.
func TestB51_AnotherCleanerTakesOver(t *testing.T) {
	r := newRooms(t)
	r.completed(2_000)
	proxy := testenv.NewProxy(t, r.URL)
	pool, err := pgxpool.New(t.Context(), proxy.URL(t, r.URL))
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	first := r.cleanup(pool, scheduler.CleanupConfig{Batch: 10, Pause: 5 * time.Millisecond})
	done := make(chan error)
	go func() {
		_, err := first.RunOnce(t.Context())
		done <- err
	}()
	eventually(t, "the first batches", func() bool { return r.count(`select count(*) from commitbox.inbox`) < 2_000 })
	second := r.cleanup(r.Pool, scheduler.CleanupConfig{})
	if report := r.clean(second); !report.Skipped {
		t.Errorf("while the first one works: %+v", report)
	}
	proxy.Refuse(true)
	proxy.Cut()
	if err := <-done; err == nil {
		t.Error("the cleaner that was cut off reports no error")
	}
	eventually(t, "the end of the first one's sessions", func() bool { return !r.clean(second).Skipped })
	if n := r.count(`select count(*) from commitbox.inbox`); n != 0 {
		t.Errorf("%d rows are left", n)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not come", what)
		}
	}
}

// Rows that somebody holds are left to a later run.
func TestP13_LockedRowsAreSkipped(t *testing.T) {
	r := newRooms(t)
	r.completed(20)
	tx, err := r.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `select from commitbox.inbox where message_id = 'm7' for update`); err != nil {
		t.Fatal(err)
	}
	c := r.cleanup(r.Pool, scheduler.CleanupConfig{Batch: 3})
	if got := r.clean(c); got.Completed != 19 || !got.Finished {
		t.Errorf("%+v", got)
	}
	tx.Rollback(t.Context())
	if got := r.clean(c); got.Completed != 1 {
		t.Errorf("%+v", got)
	}
}

// Leases that have expired go to the completer of their consumer; those of others are counted.
func TestCleanupHandsExpiredLeasesToCompleters(t *testing.T) {
	r := newRooms(t)
	r.fill()
	r.exec(`update commitbox.inbox set payload = 'p'; delete from commitbox.inbox_step where name = 's'`)
	box, err := inbox.New(r.Pool, inbox.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	c := r.cleanup(r.Pool, scheduler.CleanupConfig{Completers: map[string]func(context.Context) (int, error){
		"a": func(ctx context.Context) (int, error) {
			return inbox.Resume(ctx, box, "a", func(ctx context.Context, msg inbox.Message) error {
				_, err := inbox.Process(ctx, box, msg, func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, nil })
				return err
			})
		},
	}})
	if got := r.clean(c); got.Resumed != 3+12+6 || got.Expired != 3 {
		t.Errorf("%+v", got)
	}
}

func TestCleanupConfigNamesEveryBadField(t *testing.T) {
	t.Parallel()
	_, err := scheduler.NewCleanup(nil, scheduler.CleanupConfig{
		Schema: "Bad", Discarded: -1, Budget: -1, Batch: -1, Pause: -1, StatementTimeout: -1, LockTimeout: -1,
		Completers: map[string]func(context.Context) (int, error){"": nil},
	})
	_, long := scheduler.NewCleanup(nil, scheduler.CleanupConfig{Budget: 25 * time.Hour, StatementTimeout: 25 * time.Hour, LockTimeout: 25 * time.Hour})
	for _, field := range []string{"Budget", "StatementTimeout", "LockTimeout"} {
		if long == nil || !strings.Contains(long.Error(), field+" is longer than a day") {
			t.Errorf("%s is not named: %v", field, long)
		}
	}
	for _, field := range []string{"pool", "Schema", "Discarded", "Budget", "Batch", "Pause", "StatementTimeout", "LockTimeout", "Completers has an empty", "Completers has a nil"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not named: %v", field, err)
		}
	}
}

// A run tells how large each table is, days of kept messages counted with their table, and nothing by any other name.
func TestA10_CleanupMeasuresTheTables(t *testing.T) {
	r := newRooms(t)
	r.fill()
	r.exec(`insert into commitbox.inbox (consumer, message_id, status, finished_at) select 'c', n || repeat('x', 400), 'completed', now() from generate_series(1, 2000) n`)
	seen := sizes{}
	r.clean(r.cleanup(r.Pool, scheduler.CleanupConfig{Observer: seen}))
	if bytes := seen["inbox"]; bytes < 800_000 || int(bytes) != r.count(`select pg_total_relation_size('commitbox.inbox')`) {
		t.Errorf("the inbox takes %v bytes", bytes)
	}
	want := r.count(`select count(*) from pg_class where relnamespace = 'commitbox'::regnamespace and relkind in ('r', 'p') and not relispartition`)
	if len(seen) != want || seen["outbox_sent"] == 0 {
		t.Errorf("%d tables of %d: %v", len(seen), want, seen)
	}
}

// sizes is an observer that keeps the size of each table.
type sizes map[string]float64

func (s sizes) Observe(m *commitbox.Metric, value float64, labels ...string) {
	if m == commitbox.TableBytes {
		s[labels[0]] = value
	}
}
