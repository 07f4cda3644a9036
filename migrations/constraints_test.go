package migrations_test

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/internal/testenv"
)

// columns is a row that is accepted: SQL expressions by column.
type columns map[string]string

func (c columns) with(changes columns) columns {
	all := maps.Clone(c)
	maps.Copy(all, changes)
	return all
}

func (c columns) insert(table string) string {
	names := slices.Sorted(maps.Keys(c))
	values := make([]string, len(names))
	for i, name := range names {
		values[i] = c[name]
	}
	return "insert into commitbox." + table + " (" + strings.Join(names, ", ") + ") values (" + strings.Join(values, ", ") + ")"
}

var (
	completed = columns{"consumer": "'c'", "message_id": "'m'", "status": "'completed'", "attempts": "1", "epoch": "1", "finished_at": "now()"}
	pending   = columns{
		"consumer": "'c'", "message_id": "'m'", "status": "'pending'", "attempts": "1", "epoch": "1",
		"lease_token": "gen_random_uuid()", "lease_until": "now()",
	}
	failed = columns{"consumer": "'c'", "message_id": "'m'", "status": "'failed'", "attempts": "1", "next_attempt_at": "now()"}
	dead   = columns{"consumer": "'c'", "message_id": "'m'", "status": "'dead'", "finished_at": "now()"}

	waiting  = columns{"message_id": "gen_random_uuid()", "channel": "'c'", "topic": "'t'", "payload": "''"}
	later    = columns{"due_at": "now()", "message_id": "gen_random_uuid()", "channel": "'c'", "topic": "'t'", "payload": "''"}
	channel  = columns{"channel": "'other'"}
	shard    = columns{"channel": "'c'", "shard": "1"}
	step     = columns{"consumer": "'c'", "message_id": "'stepped'", "name": "'s'", "epoch": "1"}
	blocked  = columns{"channel": "'c'", "shard": "0", "key": "'free'", "due_at": "now()", "reason": "'retry'"}
	deferred = columns{
		"id": "1", "created_at": "now()", "message_id": "gen_random_uuid()", "shard": "0", "channel": "'c'", "key": "'k'",
		"topic": "'t'", "headers": "'{}'", "payload": "''",
	}
	buried = columns{
		"id": "1", "created_at": "now()", "message_id": "gen_random_uuid()", "shard": "0", "channel": "'c'", "attempts": "1",
		"topic": "'t'", "headers": "'{}'", "payload": "''",
	}
	policy     = columns{"consumer": "'c'"}
	replica    = columns{"replica": "'r'", "version": "1"}
	generation = columns{"only_row": "false"}
	audit      = columns{"action": "'a'", "target": "'t'"}
	resource   = columns{"type": "'t'", "id": "'i'", "version": "1"}
	job        = columns{"name": "'j'", "spec": "'@daily'", "zone": "'UTC'", "next_tick_at": "now()", "due_at": "now()"}
	ran        = job.with(columns{
		"runs": "1", "attempt": "1", "tick_at": "now()", "owner": "'o'", "started_at": "now()", "finished_at": "now()", "outcome": "'failed'",
	})
)

const (
	notNullViolation = "23502"
	checkViolation   = "23514"
	foreignViolation = "23503"
	uniqueViolation  = "23505"
)

var refusals = []struct {
	table      string
	row        columns
	changes    columns
	constraint string // empty: accepted
}{
	{"inbox", completed, nil, ""},
	{"inbox", completed, columns{"result": "''"}, ""},
	{"inbox", pending, nil, ""},
	{"inbox", failed, nil, ""},
	{"inbox", dead, nil, ""},
	{"inbox", completed, columns{"status": "'done'", "finished_at": "null"}, "inbox_status"},
	{"inbox", completed, columns{"consumer": "''"}, "inbox_consumer"},
	{"inbox", completed, columns{"consumer": "repeat('é', 101)"}, "inbox_consumer"},
	{"inbox", completed, columns{"consumer": "repeat('é', 100)"}, ""},
	{"inbox", completed, columns{"message_id": "''"}, "inbox_message_id"},
	{"inbox", completed, columns{"message_id": "repeat('m', 513)"}, "inbox_message_id"},
	{"inbox", completed, columns{"message_id": "repeat('m', 512)"}, ""},
	{"inbox", completed, columns{"consumer": "repeat('c', 201)"}, "inbox_consumer"},
	{"inbox", completed, columns{"message_id": "repeat('é', 257)"}, "inbox_message_id"},
	{"inbox", completed, columns{"fingerprint": "''"}, "inbox_fingerprint"},
	{"inbox", completed, columns{"fingerprint": "'f'"}, ""},
	{"inbox", completed, columns{"fingerprint": "decode(repeat('00', 64), 'hex')"}, ""},
	{"inbox", completed, columns{"fingerprint": "decode(repeat('00', 65), 'hex')"}, "inbox_fingerprint"},
	{"inbox", completed, columns{"result": "decode(repeat('00', 1048641), 'hex')"}, "inbox_result"},
	{"inbox", completed, columns{"result": "decode(repeat('00', 1048640), 'hex')"}, ""},
	{"inbox", dead, columns{"last_error": "repeat('e', 4097)"}, "inbox_last_error"},
	{"inbox", dead, columns{"last_error": "repeat('é', 2049)"}, "inbox_last_error"},
	{"inbox", dead, columns{"last_error": "repeat('e', 4096)"}, ""},
	{"inbox", completed, columns{"trace_id": "repeat('t', 65)"}, "inbox_trace_id"},
	{"inbox", completed, columns{"trace_id": "repeat('é', 33)"}, "inbox_trace_id"},
	{"inbox", completed, columns{"trace_id": "repeat('t', 64)"}, ""},
	{"inbox", completed, columns{"attempts": "-1"}, "inbox_attempts"},
	{"inbox", completed, columns{"epoch": "-1"}, "inbox_epoch"},
	{"inbox", pending, columns{"epoch": "0"}, "inbox_state"},
	{"inbox", pending, columns{"lease_token": "null"}, "inbox_state"},
	{"inbox", pending, columns{"lease_until": "null"}, "inbox_state"},
	{"inbox", completed, columns{"lease_until": "now()"}, "inbox_state"},
	{"inbox", completed, columns{"lease_token": "gen_random_uuid()"}, "inbox_state"},
	{"inbox", completed, columns{"finished_at": "null", "next_attempt_at": "now()"}, "inbox_state"},
	{"inbox", completed, columns{"finished_at": "null", "lease_until": "now()", "lease_token": "gen_random_uuid()"}, "inbox_state"},
	{"inbox", failed, columns{"next_attempt_at": "null", "finished_at": "now()"}, "inbox_state"},
	{"inbox", pending, columns{"lease_until": "null", "lease_token": "null", "finished_at": "now()"}, "inbox_state"},
	{"inbox", failed, columns{"result": "'r'"}, "inbox_state"},
	{"inbox", failed, columns{"lease_token": "gen_random_uuid()"}, "inbox_state"},
	{"inbox", completed, columns{"finished_at": "null"}, "inbox_state"},
	{"inbox", dead, columns{"finished_at": "null"}, "inbox_state"},
	{"inbox", failed, columns{"finished_at": "now()"}, "inbox_state"},
	{"inbox", failed, columns{"next_attempt_at": "null"}, "inbox_state"},
	{"inbox", dead, columns{"next_attempt_at": "now()"}, "inbox_state"},
	{"inbox", dead, columns{"result": "'r'"}, "inbox_state"},
	{"inbox", pending, columns{"result": "'r'"}, "inbox_state"},

	{"inbox_step", step, nil, ""},
	{"inbox_step", step, columns{"name": "''"}, "inbox_step_name_check"},
	{"inbox_step", step, columns{"name": "repeat('n', 201)"}, "inbox_step_name_check"},
	{"inbox_step", step, columns{"message_id": "'unknown'"}, "inbox_step_consumer_message_id_fkey"},

	{"outbox_message", waiting, nil, ""},
	{"outbox_message", waiting, columns{"key": "repeat('k', 512)", "topic": "repeat('t', 255)"}, ""},
	{"outbox_message", waiting, columns{"channel": "repeat('c', 63)", "content_type": "repeat('c', 255)", "id": "1"}, ""},
	{"outbox_message", waiting, columns{"channel": "'é'", "key": "'k'", "topic": "'t'", "content_type": "'c'"}, ""},
	{"outbox_message", waiting, columns{"channel": "''"}, "outbox_channel"},
	{"outbox_message", waiting, columns{"channel": "repeat('c', 64)"}, "outbox_channel"},
	{"outbox_message", waiting, columns{"topic": "''"}, "outbox_topic"},
	{"outbox_message", waiting, columns{"topic": "repeat('é', 128)"}, "outbox_topic"},
	{"outbox_message", waiting, columns{"key": "''"}, "outbox_key"},
	{"outbox_message", waiting, columns{"key": "repeat('k', 513)"}, "outbox_key"},
	{"outbox_message", waiting, columns{"content_type": "''"}, "outbox_content_type"},
	{"outbox_message", waiting, columns{"content_type": "repeat('c', 256)"}, "outbox_content_type"},
	{"outbox_message", waiting, columns{"headers": "'[]'"}, "outbox_headers"},
	{"outbox_message", waiting, columns{"headers": `'{"a": null}'`}, "outbox_headers"},
	{"outbox_message", waiting, columns{"headers": `'{"a": {"b": "c"}}'`}, "outbox_headers"},
	{"outbox_message", waiting, columns{"headers": `'{"a": ["b"]}'`}, "outbox_headers"},
	{"outbox_message", waiting, columns{"headers": `'{"a": []}'`}, "outbox_headers"},
	{"outbox_message", waiting, columns{"headers": `'{"a": "b", "": ""}'`}, ""},
	{"outbox_message", waiting, columns{"created_at": "'-infinity'"}, "outbox_created_at"},
	{"outbox_message", waiting, columns{"id": "0"}, "outbox_position"},
	{"outbox_message", waiting, columns{"headers": "'\"text\"'"}, "outbox_headers"},

	{"outbox_scheduled", later, nil, ""},
	{"outbox_scheduled", later, columns{"key": "repeat('k', 512)", "topic": "repeat('t', 255)"}, ""},
	{"outbox_scheduled", later, columns{"channel": "''"}, "outbox_channel"},
	{"outbox_scheduled", later, columns{"channel": "repeat('c', 64)"}, "outbox_channel"},
	{"outbox_scheduled", later, columns{"topic": "''"}, "outbox_topic"},
	{"outbox_scheduled", later, columns{"topic": "repeat('é', 128)"}, "outbox_topic"},
	{"outbox_scheduled", later, columns{"key": "''"}, "outbox_key"},
	{"outbox_scheduled", later, columns{"key": "repeat('k', 513)"}, "outbox_key"},
	{"outbox_scheduled", later, columns{"content_type": "''"}, "outbox_content_type"},
	{"outbox_scheduled", later, columns{"content_type": "repeat('c', 256)"}, "outbox_content_type"},
	{"outbox_scheduled", later, columns{"headers": "'[]'"}, "outbox_headers"},
	{"outbox_scheduled", later, columns{"headers": `'{"a": 1}'`}, "outbox_headers"},
	{"outbox_scheduled", later, columns{"due_at": "'infinity'"}, "outbox_scheduled_due_at_check"},
	{"outbox_scheduled", later, columns{"created_at": "'infinity'"}, "outbox_created_at"},
	{"outbox_scheduled", later, columns{"headers": "'\"text\"'"}, "outbox_headers"},

	{"outbox_channel", channel, columns{"dead_policy": "'hold'", "keep_days": "3650"}, ""},
	{"outbox_channel", channel, columns{"channel": "''"}, "outbox_channel_channel_check"},
	{"outbox_channel", channel, columns{"channel": "repeat('c', 64)"}, "outbox_channel_channel_check"},
	{"outbox_channel", channel, columns{"dead_policy": "'drop'"}, "outbox_channel_dead_policy_check"},
	{"outbox_channel", channel, columns{"keep_days": "-1"}, "outbox_channel_keep_days_check"},
	{"outbox_channel", channel, columns{"keep_days": "3651"}, "outbox_channel_keep_days_check"},

	{"outbox_shard", shard, columns{"shard": "63"}, ""},
	{"outbox_shard", shard, columns{"shard": "64"}, "outbox_shard_shard_check"},
	{"outbox_shard", shard, columns{"shard": "-1"}, "outbox_shard_shard_check"},
	{"outbox_shard", shard, columns{"channel": "'unknown'"}, "outbox_shard_channel_fkey"},
	{"outbox_relay", columns{"owner": "gen_random_uuid()", "channel": "'unknown'", "lease_until": "now()"}, nil, "outbox_relay_channel_fkey"},

	{"outbox_blocked", blocked, nil, ""},
	{"outbox_blocked", blocked, columns{"due_at": "'infinity'", "reason": "'dead'", "dead_id": "1"}, ""},
	{"outbox_blocked", blocked, columns{"due_at": "'infinity'", "reason": "'dead'"}, "outbox_blocked_held"},
	{"outbox_blocked", blocked, columns{"dead_id": "1"}, "outbox_blocked_held"},
	{"outbox_blocked", blocked, columns{"due_at": "'infinity'", "reason": "'parked'"}, ""},
	{"outbox_blocked", blocked, columns{"due_at": "'infinity'"}, "outbox_blocked_due"},
	{"outbox_blocked", blocked, columns{"reason": "'dead'", "dead_id": "1"}, "outbox_blocked_due"},
	{"outbox_blocked", blocked, columns{"due_at": "'infinity'", "reason": "'other'"}, "outbox_blocked_reason_check"},
	{"outbox_blocked", blocked, columns{"shard": "5"}, "outbox_blocked_channel_shard_fkey"},

	{"outbox_deferred", deferred, nil, ""},
	{"outbox_deferred", deferred, columns{"key": "null", "due_at": "now()"}, ""},
	{"outbox_deferred", deferred, columns{"due_at": "now()"}, "outbox_deferred_due"},
	{"outbox_deferred", deferred, columns{"key": "null"}, "outbox_deferred_due"},
	{"outbox_deferred", deferred, columns{"key": "null", "due_at": "'infinity'"}, "outbox_deferred_due"},
	{"outbox_deferred", deferred, columns{"attempts": "-1"}, "outbox_deferred_attempts_check"},
	{"outbox_deferred", deferred, columns{"last_error": "repeat('e', 2049)"}, "outbox_deferred_last_error_check"},
	{"outbox_deferred", deferred, columns{"key": "'not blocked'"}, "outbox_deferred_channel_shard_key_fkey"},

	{"outbox_dead", buried, nil, ""},
	{"outbox_dead", buried, columns{"discarded_at": "now()", "discarded_by": "'somebody'"}, ""},
	{"outbox_dead", buried, columns{"discarded_at": "now()"}, "outbox_dead_discarded"},
	{"outbox_dead", buried, columns{"last_error": "repeat('e', 2049)"}, "outbox_dead_last_error_check"},

	{"resource_version", resource, nil, ""},
	{"resource_version", resource, columns{"type": "''"}, "resource_version_lengths"},
	{"resource_version", resource, columns{"type": "repeat('t', 201)"}, "resource_version_lengths"},
	{"resource_version", resource, columns{"id": "''"}, "resource_version_lengths"},
	{"resource_version", resource, columns{"id": "repeat('i', 513)"}, "resource_version_lengths"},
	{"resource_version", resource, columns{"version": "0"}, "resource_version_counts"},

	{"audit", audit, nil, ""},
	{"audit", audit, columns{"action": "''"}, "audit_action_check"},
	{"audit", audit, columns{"action": "repeat('a', 64)"}, "audit_action_check"},
	{"audit", audit, columns{"target": "''"}, "audit_target_check"},
	{"audit", audit, columns{"target": "repeat('t', 1025)"}, "audit_target_check"},
	{"audit", audit, columns{"reason": "repeat('r', 2049)"}, "audit_reason_check"},

	{"inbox_policy", policy, columns{"mode": "'cache'", "retention": "interval '1 day'", "retry_horizon": "interval '1 day'"}, ""},
	{"inbox_policy", policy, columns{"mode": "'triple'"}, "inbox_policy_mode"},
	{"inbox_policy", policy, columns{"store_down": "'ajar'"}, "inbox_policy_store_down"},
	{"inbox_policy", policy, columns{"consumer": "''"}, "inbox_policy_consumer"},
	{"inbox_policy", policy, columns{"consumer": "repeat('c', 201)"}, "inbox_policy_consumer"},
	{"inbox_policy", policy, columns{"retention": "interval '0'"}, "inbox_policy_times"},
	{"inbox_policy", policy, columns{"lease": "interval '0.9 seconds'"}, "inbox_policy_times"},
	{"inbox_policy", policy, columns{"backoff_base": "interval '2 s'", "backoff_max": "interval '1 s'"}, "inbox_policy_times"},
	{"inbox_policy", policy, columns{"max_attempts": "0"}, "inbox_policy_attempts"},
	{"inbox_policy", policy, columns{"retention": "interval '1 hour'", "retry_horizon": "interval '2 hours'"}, "inbox_policy_retention"},
	{"inbox_policy", policy, columns{"dead_retention": "interval '1 hour'"}, "inbox_policy_retention"},
	{"inbox_policy", columns{"consumer": "'*'"}, nil, "inbox_policy_standard"},

	{"inbox_replica", replica, nil, ""},
	{"inbox_replica", replica, columns{"replica": "''"}, "inbox_replica_replica_check"},
	{"cache_generation", generation, nil, "cache_generation_only_row_check"},

	{"schedule_job", job, nil, ""},
	{"schedule_job", job, columns{"name": "''"}, "schedule_job_name_check"},
	{"schedule_job", job, columns{"name": "repeat('n', 64)"}, "schedule_job_name_check"},
	{"schedule_job", job, columns{"spec": "''"}, "schedule_job_spec_check"},
	{"schedule_job", job, columns{"spec": "repeat('s', 256)"}, "schedule_job_spec_check"},
	{"schedule_job", job, columns{"zone": "''"}, "schedule_job_zone_check"},
	{"schedule_job", job, columns{"zone": "repeat('z', 64)"}, "schedule_job_zone_check"},
	{"schedule_job", job, columns{"due_at": "now() - interval '1 s'"}, "schedule_job_due"},
	{"schedule_job", job, columns{"due_at": "'infinity'"}, "schedule_job_due"},
	{"schedule_job", job, columns{"next_tick_at": "'-infinity'"}, "schedule_job_due"},
	{"schedule_job", job, columns{"tick_at": "now()"}, "schedule_job_run"},
	{"schedule_job", job, columns{"attempt": "1"}, "schedule_job_run"},
	{"schedule_job", ran, nil, ""},
	{"schedule_job", ran, columns{"outcome": "'running'", "finished_at": "null", "lease_until": "now()"}, ""},
	{"schedule_job", ran, columns{"outcome": "'running'", "finished_at": "null"}, "schedule_job_run"},
	{"schedule_job", ran, columns{"outcome": "'running'", "finished_at": "null", "lease_until": "'infinity'"}, "schedule_job_run"},
	{"schedule_job", ran, columns{"lease_until": "now()"}, "schedule_job_run"},
	{"schedule_job", ran, columns{"finished_at": "null"}, "schedule_job_run"},
	{"schedule_job", ran, columns{"owner": "null"}, "schedule_job_run"},
	{"schedule_job", ran, columns{"attempt": "0"}, "schedule_job_run"},
	{"schedule_job", ran, columns{"outcome": "'fine'"}, "schedule_job_outcome_check"},
	{"schedule_job", ran, columns{"owner": "''"}, "schedule_job_owner_check"},
	{"schedule_job", ran, columns{"owner": "repeat('o', 256)"}, "schedule_job_owner_check"},
	{"schedule_job", ran, columns{"error": "repeat('e', 1001)"}, "schedule_job_error_check"},

	{"migration_lock", columns{"id": "2", "owner": "gen_random_uuid()", "lease_until": "now()"}, nil, "migration_lock_id_check"},
}

// What other rows refer to.
const parents = `
	insert into commitbox.inbox (consumer, message_id, status, finished_at) values ('c', 'stepped', 'completed', now());
	insert into commitbox.outbox_channel (channel) values ('c');
	insert into commitbox.outbox_shard (channel, shard) values ('c', 0);
	insert into commitbox.outbox_blocked (channel, shard, key, due_at, reason) values ('c', 0, 'k', now(), 'retry')`

func TestConstraints(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	exec(t, db, parents)
	for _, c := range refusals {
		sql := c.row.with(c.changes).insert(c.table)
		code, constraint := tryInsert(t, db, sql)
		if constraint != c.constraint || (code == "<nil>") != (c.constraint == "") {
			t.Errorf("%.300s\n%s %q, want %q", sql, code, constraint, c.constraint)
		}
		if code != "<nil>" && code != checkViolation && code != foreignViolation {
			t.Errorf("%.300s\nis refused with %s", sql, code)
		}
	}
}

// What no row of the inbox may be, no row may become. The error names the table, as that of a CHECK does.
func TestInboxRulesHoldForUpdates(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for _, c := range refusals {
		if c.table != "inbox" || c.changes == nil {
			continue
		}
		var set []string
		for _, name := range slices.Sorted(maps.Keys(c.changes)) {
			set = append(set, name+" = "+c.changes[name])
		}
		sql := c.row.insert("inbox") + "; update commitbox.inbox set " + strings.Join(set, ", ")
		_, err := db.Pool.Exec(t.Context(), sql)
		code, constraint := sqlState(err)
		if constraint != c.constraint || code != map[bool]string{true: "<nil>", false: checkViolation}[c.constraint == ""] {
			t.Errorf("%.300s\n%s %q, want %q", sql, code, constraint, c.constraint)
		}
		var refused *pgconn.PgError
		if errors.As(err, &refused) && (refused.SchemaName != "commitbox" || refused.TableName != "inbox") {
			t.Errorf("%.300s\nis refused by %s.%s", sql, refused.SchemaName, refused.TableName)
		}
		exec(t, db, `delete from commitbox.inbox`)
	}
}

// A session that applies changes of another server fires no ordinary trigger.
func TestRulesHoldForReplicatedRows(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for table, c := range map[string]struct {
		row        columns
		constraint string
	}{
		"inbox":            {pending.with(columns{"epoch": "0"}), "inbox_state"},
		"outbox_message":   {waiting.with(columns{"topic": "''"}), "outbox_topic"},
		"outbox_scheduled": {later.with(columns{"topic": "''"}), "outbox_topic"},
	} {
		sql := "set local session_replication_role = replica; " + c.row.insert(table)
		if code, constraint := tryInsert(t, db, sql); code != checkViolation || constraint != c.constraint {
			t.Errorf("%s: %s %q", table, code, constraint)
		}
	}
}

// A null where none may be is not taken for another fault.
func TestInboxNulls(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for _, row := range []columns{completed, pending, failed, dead} {
		for _, name := range []string{"consumer", "message_id", "status", "attempts", "epoch", "received_at"} {
			sql := row.with(columns{name: "null"}).insert("inbox")
			if code, _ := tryInsert(t, db, sql); code != notNullViolation {
				t.Errorf("%s\n%s", sql, code)
			}
		}
	}
}

// tryInsert leaves no row behind.
func tryInsert(t *testing.T, db *testenv.DB, sql string) (code, constraint string) {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	_, err = tx.Exec(t.Context(), sql)
	return sqlState(err)
}

// Every CHECK and foreign key of the schema has a row in the table above that it refuses.
func TestEveryConstraintIsTested(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	all := one[[]string](t, db, `select array_agg(conname::text order by conname) from pg_constraint
		where connamespace = 'commitbox'::regnamespace and contype in ('c', 'f')`)
	tested := map[string]bool{}
	for _, c := range refusals {
		tested[c.constraint] = true
	}
	for _, name := range all {
		if !tested[name] {
			t.Errorf("%s is not tested", name)
		}
	}
}

// A message is found by its bytes: no other spelling, and no collation, makes two ids one.
func TestIdsAreComparedByteByByte(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for _, id := range []string{"a", "A", "a ", "á", "a\u0301"} {
		exec(t, db, "insert into commitbox.inbox (consumer, message_id, status, finished_at) values ('c', $1, 'completed', now())", id)
	}
	code, constraint := tryInsert(t, db, completed.with(columns{"message_id": "'a'"}).insert("inbox"))
	if code != uniqueViolation || constraint != "inbox_pkey" {
		t.Errorf("the same id again: %s %s", code, constraint)
	}
	unsorted := one[[]string](t, db, `select coalesce(array_agg(format('%s.%s', attrelid::regclass, attname)), '{}')
		from pg_index i join pg_class c on c.oid = i.indrelid and c.relnamespace = 'commitbox'::regnamespace and relname <> 'goose_version'
		join pg_attribute a on a.attrelid = i.indexrelid
		where a.attcollation not in (0, (select oid from pg_collation where collname = 'C'))`)
	if diff := cmp.Diff([]string{}, unsorted); diff != "" {
		t.Errorf("indexed with a collation that an upgrade may change (-want +got):\n%s", diff)
	}
}

// The shard depends on the key alone, or on the id where there is none, and no client can choose it.
func TestShard(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	exec(t, db, "select commitbox.enqueue('t', '', (n % 50)::text) from generate_series(1, 500) n")
	if n := one[int](t, db, "select count(*) from (select 1 from commitbox.outbox_message group by key having count(distinct shard) > 1) x"); n != 0 {
		t.Errorf("%d keys are in several shards", n)
	}
	exec(t, db, "select commitbox.enqueue('t', '') from generate_series(1, 2000) n")
	spread := one[[]int](t, db, "select array[count(distinct shard), min(shard), max(shard)] from commitbox.outbox_message where key is null")
	if diff := cmp.Diff([]int{64, 0, 63}, spread); diff != "" {
		t.Errorf("shards of messages without a key (-want +got):\n%s", diff)
	}
	for _, chosen := range []string{"1", "2", "-1", "64"} {
		exec(t, db, waiting.with(columns{"key": "'chosen'", "shard": chosen}).insert("outbox_message"))
	}
	if n := one[int](t, db, "select count(*) from commitbox.outbox_message where key = 'chosen' and shard = commitbox.outbox_shard_of(key)"); n != 4 {
		t.Errorf("%d of 4 messages whose writer chose a shard are in that of their key", n)
	}
}

// A payload is stored byte for byte, JSON or not.
func TestPayloadIsNotChanged(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	payload := []byte("{\"b\":1e2,\"a\":1.10,\"b\":2}  \x00\xff")
	rows, err := db.Pool.Query(t.Context(), "select commitbox.enqueue('t', $1::bytea)", pgx.QueryExecModeExec, payload)
	if err != nil {
		t.Fatal(err)
	}
	rows.Close()
	if got := one[[]byte](t, db, "select payload from commitbox.outbox_message"); string(got) != string(payload) {
		t.Errorf("stored %q", got)
	}
}
