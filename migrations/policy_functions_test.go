package migrations_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox/internal/testenv"
)

const left = `select concat_ws(' ', mode, from_mode, case when table_left is not null then 'table left' end, case when guard_left is not null then 'guard left' end)
	from commitbox.inbox_policies where consumer = $1`

func setPolicy(t *testing.T, db *testenv.DB, consumer, change string) int64 {
	t.Helper()
	return one[int64](t, db, "select commitbox.inbox_policy_set($1, $2::jsonb, 'because')", consumer, change)
}

// A change notes the history that it leaves behind, whoever makes it and whatever the row inherits.
func TestF10_AChangeOfModeNotesWhichHistoryItLeaves(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for _, step := range []struct{ consumer, mode, want string }{
		{"c", "cache", "cache postgres table left"},
		{"c", "postgres", "postgres cache guard left"},
		{"c", "double", "double postgres guard left"},
		{"c", "off", "off double table left guard left"},
		{"c", "cache", "cache off table left"},
		{"*", "cache", "cache postgres table left"},
		{"*", "double", "double cache guard left"},
		{"inherits", "postgres", "postgres double guard left"},
	} {
		setPolicy(t, db, step.consumer, fmt.Sprintf(`{"mode": %q}`, step.mode))
		if got := one[string](t, db, left, step.consumer); got != step.want {
			t.Errorf("%s after %s: %s, want %s", step.consumer, step.mode, got, step.want)
		}
	}
	exec(t, db, "update commitbox.inbox_policy set mode = null where consumer = 'c'")
	if got := one[string](t, db, left, "c"); got != "double cache guard left" {
		t.Errorf("by hand, back to what it inherits: %s", got)
	}
	if !one[bool](t, db, "select commitbox.inbox_policy_forget('c')") || one[bool](t, db, "select commitbox.inbox_policy_forget('unknown')") {
		t.Error("forget did not find what there was, or found what there was not")
	}
}

func TestF19_ARetentionShorterThanTheRetryHorizonIsRefused(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	setPolicy(t, db, "c", `{"retention": "2 days"}`)
	for _, sql := range []string{
		`select commitbox.inbox_policy_set('d', '{"retention": "1 hour"}')`,
		`select commitbox.inbox_policy_set('*', '{"retry_horizon": "3 days"}')`, // c inherits it
		`update commitbox.inbox_policy set retry_horizon = interval '8 days' where consumer = 'c'`,
		`insert into commitbox.inbox_policy (consumer, dead_retention) values ('d', interval '1 hour')`,
	} {
		if code, constraint := tryInsert(t, db, sql); code != checkViolation || constraint != "inbox_policy_retention" {
			t.Errorf("%s: %s %s", sql, code, constraint)
		}
	}
	for sql, want := range map[string]string{
		"delete from commitbox.inbox_policy where consumer = 'c'":         "23001",
		"update commitbox.inbox_policy set consumer = 'd'":                "23001",
		`select commitbox.inbox_policy_set('c', '{"modus": "off"}')`:      "22023",
		`select commitbox.inbox_policy_set('c', '{"retention": "long"}')`: "22007",
	} {
		if code, _ := tryInsert(t, db, sql); code != want {
			t.Errorf("%s: %s, want %s", sql, code, want)
		}
	}
}

func TestPolicyFunctions(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	first := setPolicy(t, db, "c", `{"mode": "double", "lease": "90 seconds", "max_attempts": 3}`)
	if second := setPolicy(t, db, "c", `{"lease": null}`); second <= first {
		t.Errorf("version %d after %d", second, first)
	}
	const got = `select concat_ws(' ', consumer, mode, level, retention, coalesce(lease::text, 'none'), max_attempts) from commitbox.inbox_policy_of($1)`
	for consumer, want := range map[string]string{"c": "c double strong 7 days none 3", "other": "* postgres exactly-once effect 7 days none"} {
		if got := one[string](t, db, got, consumer); got != want {
			t.Errorf("%s: %q, want %q", consumer, got, want)
		}
	}
	before := one[int64](t, db, "select generation from commitbox.cache_generation")
	exec(t, db, "update commitbox.cache_generation set generation = generation + 1000000000000")
	if after := one[int64](t, db, "select commitbox.cache_rotate('restored')"); after != before+1000000000001 {
		t.Errorf("generation %d after %d and a jump", after, before)
	}
	actions := one[[]string](t, db, "select array_agg(action || ' ' || reason order by id) from commitbox.audit")
	if diff := cmp.Diff([]string{"inbox_policy_set because", "inbox_policy_set because", "cache_rotate restored"}, actions); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
}
