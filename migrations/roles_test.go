package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// role makes a role of the server whose name begins with kind, with the rights of the kinds; it goes with the test. The pool works as it.
func role(t *testing.T, d *testenv.DB, kind string, kinds ...string) (name string, pool *pgxpool.Pool) {
	t.Helper()
	name = strings.Replace(d.Name, "test", "Role "+kind, 1) // has to be quoted
	quoted := pgx.Identifier{name}.Sanitize()
	query(t, d.Pool, "create role "+quoted)
	t.Cleanup(func() {
		for _, sql := range []string{"drop owned by " + quoted, "drop role " + quoted} {
			if _, err := d.Pool.Exec(context.Background(), sql); err != nil {
				t.Error(err)
			}
		}
	})
	for _, k := range kinds {
		query(t, d.Pool, `select commitbox.grant_rights($1, $2)`, k, name)
	}
	cfg := d.Pool.Config()
	cfg.MaxConns = 2
	cfg.ConnConfig.RuntimeParams["role"] = name
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return name, pool
}

func query(t *testing.T, pool *pgxpool.Pool, sql string, args ...any) (lines []string) {
	t.Helper()
	rows, err := pool.Query(context.Background(), sql, args...)
	if err == nil {
		lines, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
			values, err := row.Values()
			return fmt.Sprint(values...), err
		})
	}
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return lines
}

const rolesFixture = `
	insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until, finished_at, next_attempt_at)
	select 'c', s || n, s, 1, 1, case when s = 'pending' then gen_random_uuid() end, case when s = 'pending' then now() - interval '1 year' end,
	       case when s in ('completed', 'dead') then now() - interval '1 year' end, case when s = 'failed' then now() - interval '1 hour' end
	  from unnest(array['pending', 'failed', 'completed', 'dead']) s, generate_series(1, 3) n;
	insert into commitbox.inbox_step (consumer, message_id, name, epoch) select 'c', 'pending1', 's', 1;
	insert into commitbox.outbox_message (message_id, channel, topic, payload) select gen_random_uuid(), 'default', 't', '' from generate_series(1, 3);
	insert into commitbox.outbox_scheduled (due_at, message_id, channel, topic, payload) select now(), gen_random_uuid(), 'default', 't', '';
	insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, topic, headers, payload, discarded_at, discarded_by)
	select n, now(), gen_random_uuid(), 0, 1, 'default', 't', '{}', '', case when n > 3 then now() end, case when n > 3 then 'x' end from generate_series(1, 5) n;
	insert into commitbox.outbox_channel (channel) values ('default');
	select commitbox.outbox_register('default');
	insert into commitbox.outbox_blocked (channel, shard, key, due_at, reason) select 'default', commitbox.outbox_shard_of('k'), 'k', 'infinity', 'parked';
	insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, key, topic, headers, payload, deferred_at)
	select 9, now(), gen_random_uuid(), commitbox.outbox_shard_of('k'), 'default', 'k', 't', '{}', '', now()`

// unfinished is all that may neither go nor change, as text, and what else was changed.
const unfinished = `select i::text from commitbox.inbox i where status in ('pending', 'failed') union all select s::text from commitbox.inbox_step s
	union all select m::text from commitbox.outbox_message m union all select s::text from commitbox.outbox_scheduled s
	union all select d::text from commitbox.outbox_deferred d union all select d::text from commitbox.outbox_dead d where discarded_at is null
	union all select 'changed' from commitbox.inbox where trace_id is not null union all select 'changed' from commitbox.outbox_dead where last_error is not null order by 1`

// Whatever a role that cleans up sends, no message that is not delivered and no row that is not finished goes, nor is changed.
func TestP13_ARoleThatCleansUpCannotRemoveWhatIsNotFinished(t *testing.T) {
	t.Parallel()
	d := testenv.Database(t)
	_, pool := role(t, d, "cleanup", "cleanup")
	exec(t, d, rolesFixture)
	before := query(t, d.Pool, unfinished)
	if len(before) != 3+3+1+3+1+1+3 {
		t.Fatalf("%d rows", len(before))
	}
	for _, hostile := range append(merges(t, d), []string{
		`update commitbox.inbox set trace_id = 'x' where status in ('completed', 'dead')`,
		`update commitbox.outbox_dead set last_error = 'x' where discarded_at is not null`,
		`update commitbox.inbox set trace_id = 'x' where status = 'failed'; delete from commitbox.inbox where status in ('failed', 'completed')`,
		`begin; update commitbox.inbox set trace_id = trace_id where status = 'failed'; delete from commitbox.inbox where status = 'failed'; commit`,
		`with x as (update commitbox.inbox set trace_id = 'x' where status = 'pending' returning consumer) delete from commitbox.inbox i using x where i.consumer = x.consumer`,
		`delete from commitbox.inbox where ctid = any (array(select ctid from commitbox.inbox where status = 'failed'))`,
		`delete from commitbox.inbox i using commitbox.outbox_channel c where i.status = 'pending'`,
		`delete from commitbox.inbox i using commitbox.outbox_dead d where i.status = 'failed' or d.discarded_at is null`,
		`begin; declare c cursor for select status from commitbox.inbox where status = 'failed' for update; fetch 1 from c; delete from commitbox.inbox where current of c; commit`,
		`begin; lock table commitbox.inbox; delete from commitbox.inbox where status = 'failed'; commit`,
		`prepare p as delete from commitbox.inbox where status = 'failed'; execute p`,
		`do 'begin delete from commitbox.inbox where status = ''pending''; end'`,
		`create function pg_temp.f() returns void language sql security definer as 'delete from commitbox.inbox where status = ''pending'' '; select pg_temp.f()`,
		`create function pg_temp.is_over(text) returns boolean language sql cost 0.0001 as 'select true'; delete from commitbox.inbox where pg_temp.is_over(status)`,
		`copy commitbox.inbox (consumer, message_id, status) from '/dev/null'`,
		`copy (with x as (delete from commitbox.inbox where status = 'pending' returning 1) select * from x) to '/dev/null'`,
		`create rule r as on delete to commitbox.outbox_dead do also delete from commitbox.outbox_message`,
		`create trigger g before delete on commitbox.inbox for each row execute function suppress_redundant_updates_trigger()`,
		`alter table commitbox.inbox no force row level security, disable row level security`,
		`alter policy everybody on commitbox.inbox using (true)`,
		`truncate commitbox.outbox_message`,
		`truncate commitbox.outbox_dead`,
		`truncate commitbox.inbox_step`,
		`select commitbox.outbox_sent_days(0, 0)`,
		`select commitbox.limit_cleanup(current_user::name)`,
		`delete from commitbox.outbox_blocked`,
		`delete from commitbox.outbox_relay`,
		`delete from commitbox.outbox_shard`,
		`delete from commitbox.outbox_channel`,
		`delete from commitbox.inbox`,
		`delete from commitbox.inbox where status = 'pending'`,
		`delete from commitbox.inbox using commitbox.inbox o where o.status = 'failed' and commitbox.inbox.message_id = o.message_id`,
		`with x as (delete from commitbox.inbox where status = 'failed' returning 1) select count(*) from x`,
		`update commitbox.inbox set status = 'dead', finished_at = now(), next_attempt_at = null where status = 'failed'`,
		`update commitbox.inbox set trace_id = 'x'`,
		`update commitbox.inbox set trace_id = 'x' where status = 'completed'`,
		`insert into commitbox.inbox (consumer, message_id, status, finished_at) values ('c', 'failed1', 'dead', now()) on conflict (consumer, message_id) do update set status = 'dead'`,
		`truncate commitbox.inbox cascade`,
		`select commitbox.inbox_discard('c', 'failed1')`,
		`select commitbox.inbox_mark_completed('c', 'failed1')`,
		`select commitbox.inbox_requeue('c', 'dead1')`,
		`select commitbox.inbox_abandon('c', 'infinity', 1000)`,
		`select commitbox.inbox_abandon('c', '2999-01-01', 1000)`,
		`select commitbox.inbox_policy_set('c', '{"abandon_after": "1 second"}')`,
		`update commitbox.inbox_policy set abandon_after = interval '1 second'`,
		`delete from commitbox.inbox_step`,
		`delete from commitbox.outbox_message`,
		`delete from commitbox.outbox_scheduled`,
		`delete from commitbox.outbox_deferred`,
		`delete from commitbox.outbox_sent`,
		`delete from commitbox.outbox_dead`,
		`update commitbox.outbox_dead set last_error = 'x'`,
		`update commitbox.outbox_dead set discarded_at = now(), discarded_by = 'me'`,
		`select commitbox.outbox_discard('default', message_id) from commitbox.outbox_dead`,
		`select commitbox.forget_gone('infinity', 1000)`,
		`set row_security = off; delete from commitbox.inbox`,
		`alter table commitbox.inbox disable row level security`,
		`drop policy everybody on commitbox.inbox`,
		`select commitbox.grant_rights('consume', current_user::name)`,
		`drop table commitbox.outbox_message`,
	}...) {
		_, err := pool.Exec(t.Context(), hostile, pgx.QueryExecModeSimpleProtocol)
		if after := query(t, d.Pool, unfinished); !slices.Equal(before, after) {
			t.Errorf("%s: %s became %s (%v)", hostile, before, after, err)
			before = after
		}
	}
	if left := query(t, d.Pool, `select count(*) from commitbox.inbox where status in ('completed', 'dead') union all
		select count(*) from commitbox.outbox_dead where discarded_at is not null`); !slices.Equal(left, []string{"0", "0"}) {
		t.Errorf("%s finished rows are left: the role cannot do its work", left)
	}
}

// merges is what MERGE can do to rows, where the server has it.
func merges(t *testing.T, d *testenv.DB) (list []string) {
	t.Helper()
	version, err := strconv.Atoi(query(t, d.Pool, `select current_setting('server_version_num')`)[0])
	if err != nil {
		t.Fatal(err)
	}
	if version >= 150_000 {
		list = append(list,
			`merge into commitbox.inbox i using (values (1)) v on i.status = 'failed' when matched then delete`,
			`merge into commitbox.inbox i using commitbox.outbox_channel c on true when matched and i.status = 'pending' then delete`,
			`merge into commitbox.inbox i using (values (1)) v on i.status = 'failed' when matched then update set trace_id = 'x'`,
			`merge into commitbox.outbox_dead d using (values (1)) v on d.discarded_at is null when matched then delete`)
	}
	if version >= 170_000 {
		list = append(list, `merge into commitbox.inbox i using (values (1)) v on false when not matched by source then delete`)
	}
	return list
}

// A role that cleans up sees what is over and whose it is, but neither ids nor content.
func TestARoleThatCleansUpReadsNoContent(t *testing.T) {
	t.Parallel()
	d := testenv.Database(t)
	_, pool := role(t, d, "cleanup", "cleanup")
	for _, sql := range []string{
		`select payload from commitbox.inbox`, `select result from commitbox.inbox`, `select message_id from commitbox.inbox`, `select i from commitbox.inbox i`,
		`delete from commitbox.inbox returning payload`, `select payload from commitbox.outbox_dead`, `select key from commitbox.outbox_dead`,
		`select 1 from commitbox.outbox_message`, `select 1 from commitbox.outbox_sent`, `select 1 from commitbox.audit`,
	} {
		var refused *pgconn.PgError
		if _, err := pool.Exec(t.Context(), sql); !errors.As(err, &refused) || refused.Code != "42501" {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

var parameter = regexp.MustCompile(`\$(\d+)`)

// plans explains statements as the pool's role, planned for any arguments.
func plans(t *testing.T, pool *pgxpool.Pool) (lines []string) {
	t.Helper()
	err := pool.AcquireFunc(t.Context(), func(conn *pgxpool.Conn) error {
		if _, err := conn.Exec(t.Context(), "set plan_cache_mode = force_generic_plan; set enable_seqscan = off"); err != nil {
			return err
		}
		for i, sql := range []string{
			db.InboxClaim, db.InboxLook, db.InboxTakeover, db.InboxRecordFailure, db.InboxClaimBatch, db.InboxAcquire, db.InboxComplete, db.InboxRenew,
			db.KeepConfirmed, db.DeleteConfirmed,
		} {
			args := 0
			for _, n := range parameter.FindAllStringSubmatch(sql, -1) {
				number, _ := strconv.Atoi(n[1])
				args = max(args, number)
			}
			if _, err := conn.Exec(t.Context(), fmt.Sprintf("prepare s%d as %s", i, sql)); err != nil {
				return err
			}
			rows, err := conn.Query(t.Context(), fmt.Sprintf("explain (costs off) execute s%d(%s)", i, strings.Repeat(", null", args)[2:]))
			if err != nil {
				return err
			}
			plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
			if err != nil {
				return err
			}
			lines = append(lines, sql)
			for _, line := range plan {
				line, _, _ = strings.Cut(line, "Filter: ") // the order of its conditions may differ
				lines = append(lines, line)
			}
			if _, err := conn.Exec(t.Context(), fmt.Sprint("deallocate s", i)); err != nil {
				return err
			}
		}
		_, err := conn.Exec(t.Context(), "reset plan_cache_mode; reset enable_seqscan")
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return lines
}

// Row security is on only where a role cleans up, and costs the others nothing: the plans of other roles and of the owner stay.
func TestRowSecurityChangesNoOtherPlan(t *testing.T) {
	t.Parallel()
	d := testenv.Database(t)
	exec(t, d, rolesFixture)
	_, worker := role(t, d, "worker", "consume", "relay")
	before := plans(t, worker)
	if n := one[int64](t, d, "select count(*) from pg_class where relnamespace = 'commitbox'::regnamespace and relrowsecurity"); n != 0 {
		t.Errorf("row security is on for %d tables before any role cleans up", n)
	}
	role(t, d, "cleanup", "cleanup")
	if n := one[int64](t, d, "select count(*) from pg_class where relnamespace = 'commitbox'::regnamespace and relrowsecurity"); n != 2 {
		t.Errorf("row security is on for %d tables", n)
	}
	for who, pool := range map[string]*pgxpool.Pool{"worker": worker, "owner": d.Pool} {
		if diff := cmp.Diff(before, plans(t, pool)); diff != "" {
			t.Errorf("%s: plans changed (-before +after):\n%s", who, diff)
		}
	}
}

// The start-up check tells which right is missing, as the statement that gives it.
func TestB88_MissingRightsAreNamed(t *testing.T) {
	t.Parallel()
	d := testenv.Database(t)
	for _, kind := range []string{"produce", "relay", "consume", "cleanup", "observe"} {
		name, _ := role(t, d, kind, kind)
		quoted := pgx.Identifier{name}.Sanitize()
		missing := func() []string { return query(t, d.Pool, `select commitbox.missing_rights($1, $2)`, kind, name) }
		if m := missing(); len(m) != 0 {
			t.Errorf("%s: with all rights: %q", kind, m)
		}
		for _, r := range query(t, d.Pool, `select p[1] || ' on ' || r.object_type || ' ' || r.object from commitbox.rights($1) r,
			regexp_matches(r.privileges, '(\w+(?: \([^)]*\))?)', 'g') p`, kind) {
			query(t, d.Pool, "revoke "+r+" from "+quoted)
			if m := missing(); len(m) != 1 || m[0] != "grant "+r+" to "+quoted {
				t.Errorf("%s: without %s: %q", kind, r, m)
			}
			query(t, d.Pool, missing()[0])
		}
		if m := missing(); len(m) != 0 {
			t.Errorf("%s: after its own advice: %q", kind, m)
		}
	}
}

func TestGrantRightsRefuses(t *testing.T) {
	t.Parallel()
	d := testenv.Database(t)
	cleaner, _ := role(t, d, "cleanup", "cleanup", "cleanup") // twice is no error
	member, _ := role(t, d, "member", "consume")
	refused := func(code, kind, name string) {
		t.Helper()
		_, err := d.Pool.Exec(t.Context(), `select commitbox.grant_rights($1, $2)`, kind, name)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.Code != code {
			t.Errorf("%s to %s: %v", kind, name, err)
		}
	}
	refused("42704", "consume", "nobody of this name")
	refused("22023", "everything", member)
	refused("0LP01", "consume", cleaner)
	query(t, d.Pool, "grant "+pgx.Identifier{cleaner}.Sanitize()+" to "+pgx.Identifier{member}.Sanitize())
	refused("0LP01", "consume", member)
	if m := query(t, d.Pool, `select commitbox.missing_rights('consume', $1)`, member); len(m) != 1 || !strings.HasPrefix(m[0], "revoke the membership") {
		t.Errorf("%q", m)
	}
}

// A role that owns the schema and nothing else can migrate it down and up again.
func TestARoleThatMigratesOwnsTheSchema(t *testing.T) {
	t.Parallel()
	d := testenv.Database(t)
	name, pool := role(t, d, "migrate", "migrate")
	cleaner, _ := role(t, d, "cleanup", "cleanup")
	query(t, d.Pool, `select commitbox.outbox_sent_days(1, 1)`)
	others := query(t, d.Pool, `select c.relname from pg_class c where c.relnamespace = 'commitbox'::regnamespace and c.relowner <> $1::text::regrole and c.relname not like 'outbox_sent_2%'
		union all select d.typname from pg_type d where d.typnamespace = 'commitbox'::regnamespace and d.typtype = 'd' and d.typowner <> $1::text::regrole
		union all select p.proname from pg_proc p where p.pronamespace = 'commitbox'::regnamespace and p.proowner <> $1::text::regrole`, pgx.Identifier{name}.Sanitize())
	if len(others) != 0 {
		t.Errorf("still somebody else's: %q", others)
	}
	for _, step := range []func(context.Context, *pgxpool.Pool, migrate.Config) error{migrate.Down, migrate.Up} {
		if err := step(t.Context(), pool, migrate.Config{}); err != nil {
			t.Fatal(err)
		}
	}
	if m := query(t, pool, `select commitbox.grant_rights('cleanup', $1)`, cleaner); len(m) != 1 {
		t.Errorf("%q", m)
	}
}

// Everything works in a schema whose name has to be quoted.
func TestRightsInAnotherSchema(t *testing.T) {
	t.Parallel()
	d := testenv.EmptyDatabase(t)
	if err := migrate.Up(t.Context(), d.Pool, migrate.Config{Schema: "order"}); err != nil {
		t.Fatal(err)
	}
	name, _ := role(t, d, "cleanup")
	for _, kind := range []string{"observe", "cleanup"} {
		query(t, d.Pool, `select "order".grant_rights($1, $2)`, kind, name)
	}
	if m := query(t, d.Pool, `select "order".missing_rights('cleanup', $1)`, name); len(m) != 0 {
		t.Errorf("%q", m)
	}
	query(t, d.Pool, `select "order".grant_rights('migrate', $1)`, name)
}
