package migrations_test

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/testenv"
)

// A writer that may only insert needs no right on a function, where the owner has taken what everybody may call by default.
func TestAProducerNeedsNoRightOnAFunction(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	exec(t, db, "revoke execute on all functions in schema commitbox from public")
	_, pool := role(t, db, "produce", "produce")
	for table, row := range map[string]columns{"outbox_message": waiting, "outbox_scheduled": later} {
		if _, err := pool.Exec(t.Context(), row.insert(table)); err != nil {
			t.Errorf("%s: %v", table, err)
		}
	}
}

// No search path of a session changes what a message may be, nor its shard.
func TestTheOutboxIsCheckedOnEverySearchPath(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	exec(t, db, `create schema evil;
		create function evil.octet_length(text) returns integer language sql immutable as 'select 1';
		create function evil.jsonb_typeof(jsonb) returns text language sql immutable as $$ select 'object' $$;
		create function evil.jsonb_path_exists(jsonb, jsonpath) returns boolean language sql immutable as 'select false';
		create function evil.hashtextextended(text, bigint) returns bigint language sql immutable as 'select 99::bigint';
		create function evil.isfinite(timestamptz) returns boolean language sql immutable as 'select true';
		create function evil.never(text, text) returns boolean language sql immutable as 'select false';
		create function evil.never(integer, integer) returns boolean language sql immutable as 'select false';
		create function evil.never(bigint, integer) returns boolean language sql immutable as 'select false';
		create operator evil.<> (leftarg = text, rightarg = text, procedure = evil.never);
		create operator evil.< (leftarg = integer, rightarg = integer, procedure = evil.never);
		create operator evil.> (leftarg = integer, rightarg = integer, procedure = evil.never);
		create operator evil.<= (leftarg = bigint, rightarg = integer, procedure = evil.never);
		create function evil.two(bigint, integer) returns bigint language sql immutable as 'select 2::bigint';
		create operator evil.& (leftarg = bigint, rightarg = integer, procedure = evil.two);
		create function evil.never(name, name) returns boolean language sql immutable as 'select false';
		create operator evil.= (leftarg = name, rightarg = name, procedure = evil.never);`)
	for _, path := range []string{"''", "pg_catalog", "evil", "evil, pg_catalog"} {
		for _, c := range refusals {
			if !strings.HasPrefix(c.table, "outbox_") || c.constraint == "" || strings.HasSuffix(c.constraint, "_check") {
				continue
			}
			tx, err := db.Pool.Begin(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := tx.Exec(t.Context(), "set local search_path = "+path); err != nil {
				t.Fatal(err)
			}
			_, err = tx.Exec(t.Context(), c.row.with(c.changes).insert(c.table))
			if code, constraint := sqlState(err); constraint != c.constraint {
				t.Errorf("search path %s: %.200v in %s: %s %q, want %q", path, c.changes, c.table, code, constraint, c.constraint)
			}
			tx.Rollback(t.Context())
		}
		tx, err := db.Pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		var right bool
		if _, err = tx.Exec(t.Context(), "set local search_path = "+path); err == nil {
			err = tx.QueryRow(t.Context(), waiting.with(columns{"key": "'k'"}).insert("outbox_message")+" returning shard operator(pg_catalog.=) commitbox.outbox_shard_of('k')").Scan(&right)
		}
		if !right {
			t.Errorf("search path %s: another shard, %v", path, err)
		}
		tx.Rollback(t.Context())
	}
}

// A trigger's rules are not in the catalog; each has a row in the table of refusals too.
func TestEveryRuleOfTheOutboxIsTested(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	source := one[string](t, db, "select prosrc from pg_proc where oid = 'commitbox.outbox_check'::regproc")
	rules := regexp.MustCompile(`then '(\w+)'`).FindAllStringSubmatch(source, -1)
	if len(rules) != 7 {
		t.Errorf("%d rules", len(rules))
	}
	for _, table := range []string{"outbox_message", "outbox_scheduled"} {
		tested := map[string]bool{}
		for _, c := range refusals {
			tested[c.constraint] = tested[c.constraint] || c.table == table
		}
		for _, rule := range rules {
			if !tested[rule[1]] && (table != "outbox_scheduled" || rule[1] != "outbox_position") { // there no writer chooses the position
				t.Errorf("%s of %s is not tested", rule[1], table)
			}
		}
	}
}

// A null is refused by the name of its column, where the columns beside it depend on it too.
func TestNullsOfTheOutboxAreNamed(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for table, row := range map[string]columns{"outbox_message": waiting, "outbox_scheduled": later} {
		for _, column := range []string{"message_id", "channel", "topic", "headers", "payload", "created_at"} {
			code, _ := tryInsert(t, db, row.with(columns{column: "null"}).insert(table))
			_, err := db.Pool.Exec(t.Context(), row.with(columns{column: "null"}).insert(table))
			if code != "23502" || !strings.Contains(err.Error(), fmt.Sprintf("column %q", column)) {
				t.Errorf("%s.%s: %v", table, column, err)
			}
		}
	}
}

// However rows come, by COPY, many in one statement or by an update, each is checked and gets its shard.
func TestTheOutboxIsCheckedHoweverRowsCome(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	copied := func(topic string) error {
		_, err := db.Pool.CopyFrom(t.Context(), pgx.Identifier{"commitbox", "outbox_message"}, []string{"message_id", "channel", "key", "topic", "payload", "shard"},
			pgx.CopyFromRows([][]any{{[16]byte{1}, "c", "a", "t", []byte{}, int16(-1)}, {[16]byte{2}, "c", nil, topic, []byte{}, nil}}))
		return err
	}
	const several = `insert into commitbox.outbox_message (message_id, channel, key, topic, payload)
		select gen_random_uuid(), 'c', 'k' || n, case n when %d then '' else 't' end, '' from generate_series(1, 50) n`
	for what, try := range map[string]func(bad bool) error{
		"copy": func(bad bool) error { return copied(map[bool]string{false: "t"}[bad]) },
		"several": func(bad bool) error {
			_, err := db.Pool.Exec(t.Context(), fmt.Sprintf(several, map[bool]int{true: 33}[bad]))
			return err
		},
		"update": func(bad bool) error {
			_, err := db.Pool.Exec(t.Context(), "update commitbox.outbox_message set key = 'other', topic = $1", map[bool]string{false: "t"}[bad])
			return err
		},
	} {
		exec(t, db, waiting.insert("outbox_message"))
		if code, rule := sqlState(try(true)); code != checkViolation || rule != "outbox_topic" {
			t.Errorf("%s of a bad row: %s %s", what, code, rule)
		}
		if err := try(false); err != nil {
			t.Errorf("%s: %v", what, err)
		}
		if n := one[int](t, db, "select count(*) from commitbox.outbox_message where shard <> commitbox.outbox_shard_of(coalesce(key, message_id::text))"); n > 0 {
			t.Errorf("%s: %d rows are in another shard", what, n)
		}
		exec(t, db, "delete from commitbox.outbox_message")
	}
}
