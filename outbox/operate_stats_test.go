package outbox_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// fill puts so many messages into each of the first four shards of each table, and some for later.
func fill(t *testing.T, db *testenv.DB, perShard, scheduled int) {
	t.Helper()
	for _, sql := range []string{
		`insert into commitbox.outbox_message (message_id, channel, key, topic, payload)
			select '00000000-0000-0000-0000-000000000000', 'default', k.key, 't', '' from generate_series(1, $1) g, (
				select distinct on (commitbox.outbox_shard_of(n::text)) n::text as key from generate_series(1, 1000) n
				 where commitbox.outbox_shard_of(n::text) < 4) k`,
		`insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, topic, headers, payload, due_at)
			select nextval('commitbox.outbox_seq'), now(), '00000000-0000-0000-0000-000000000000', s, 'default', 't', '{}', '', now() from generate_series(1, $1) g, generate_series(0, 3) s`,
		`insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, topic, headers, payload, discarded_at, discarded_by)
			select nextval('commitbox.outbox_seq'), now(), '00000000-0000-0000-0000-000000000000', s, 1, 'default', 't', '{}', '', case g % 2 when 0 then now() end, case g % 2 when 0 then 'me' end
			  from generate_series(1, $1) g, generate_series(0, 3) s`,
	} {
		_, err := db.Pool.Exec(t.Context(), sql, perShard)
		must(t, err)
	}
	_, err := db.Pool.Exec(t.Context(), `insert into commitbox.outbox_scheduled (due_at, message_id, channel, topic, payload)
		select now() + interval '1 day', '00000000-0000-0000-0000-000000000000', 'default', 't', '' from generate_series(1, $1)`, scheduled)
	must(t, err)
	for _, table := range []string{"message", "deferred", "dead", "scheduled"} {
		_, err := db.Pool.Exec(t.Context(), "vacuum analyze commitbox.outbox_"+table)
		must(t, err)
	}
}

func TestOperatorStatsAreExactUpToTenThousandPerShard(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	stats := func() outbox.Stats {
		t.Helper()
		s, err := o.Stats(t.Context(), channel)
		must(t, err)
		s.Oldest = 0
		return s
	}
	fill(t, db, 10_000, 5)
	if diff := cmp.Diff(outbox.Stats{
		Pending: 40_000, PendingExact: true, Deferred: 40_000, DeferredExact: true, Dead: 20_000, Discarded: 20_000, DeadExact: true, Scheduled: 5, ScheduledExact: true,
	}, stats()); diff != "" {
		t.Errorf("10 000 in a shard (-want +got):\n%s", diff)
	}
	fill(t, db, 1, 0)
	s := stats()
	if s.PendingExact || s.DeferredExact || s.DeadExact || !s.ScheduledExact {
		t.Errorf("10 001 in a shard: %+v", s)
	}
	if s.Pending < 40_004 || s.Deferred < 40_004 || s.Dead < 20_000 || s.Scheduled != 5 {
		t.Errorf("estimates below what there is: %+v", s)
	}
}

// However long the backlog is, and in whichever table: what the statement reads has a bound, and grows no further.
func TestOperatorStatsReadNoMoreOfALongerBacklog(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	o := newOperator(t, db)
	fill(t, db, 11_000, 641_000)
	rows, buffers := statsCost(t, db)
	s, err := o.Stats(t.Context(), channel)
	must(t, err)
	if s.PendingExact || s.DeferredExact || s.DeadExact || s.ScheduledExact || s.Scheduled < 641_000 {
		t.Errorf("stats of a backlog: %+v", s)
	}
	// Three shards of three tables, the first of each shard of two, and the scheduled ones.
	if most := 3*3*10_001 + 2*64 + 640_001 + 100; rows > most {
		t.Errorf("%d rows were read, want at most %d", rows, most)
	}
	fill(t, db, 11_000, 0)
	rowsOfTwice, buffersOfTwice := statsCost(t, db)
	t.Logf("rows %d, then %d; buffers %d, then %d", rows, rowsOfTwice, buffers, buffersOfTwice)
	if rowsOfTwice > rows+100 || buffersOfTwice > buffers+buffers/10 {
		t.Errorf("of twice the backlog %d rows and %d buffers were read, before %d and %d", rowsOfTwice, buffersOfTwice, rows, buffers)
	}
}

// planNode is a node of a plan that was run.
type planNode struct {
	Relation string     `json:"Relation Name"`
	Rows     float64    `json:"Actual Rows"`
	Removed  float64    `json:"Rows Removed by Filter"`
	Loops    float64    `json:"Actual Loops"`
	Hit      int        `json:"Shared Hit Blocks"`
	Read     int        `json:"Shared Read Blocks"`
	Plans    []planNode `json:"Plans"`
}

// scanned adds up the rows that the node read of tables.
func (n planNode) scanned() (rows int) {
	if strings.HasPrefix(n.Relation, "outbox_") {
		rows = int((n.Rows + n.Removed) * n.Loops)
	}
	for _, p := range n.Plans {
		rows += p.scanned()
	}
	return rows
}

// statsCost counts the rows and the buffers that the statistics read.
func statsCost(t *testing.T, db *testenv.DB) (rows, buffers int) {
	t.Helper()
	var text []byte
	must(t, db.Pool.QueryRow(t.Context(), "explain (analyze, buffers, timing off, format json) select * from commitbox.outbox_stats('default')").Scan(&text))
	var plans []struct{ Plan planNode }
	must(t, json.Unmarshal(text, &plans))
	top := plans[0].Plan
	if rows = top.scanned(); rows == 0 {
		t.Fatalf("the plan names no table: %s", text)
	}
	return rows, top.Hit + top.Read
}
