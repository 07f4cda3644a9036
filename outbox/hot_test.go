package outbox

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
)

// variety is a message that shares some of its texts with those beside it, and lacks others that they have.
func variety(i int) Message {
	m := Message{Topic: []string{"a", "a", "b"}[i%3], Payload: []byte(strings.Repeat(fmt.Sprint(i), i%7))}
	if i%2 == 0 {
		m.Key = fmt.Sprint("k", i%4)
	}
	if i%5 < 2 {
		m.ContentType = "text/plain"
	}
	switch i % 4 {
	case 1:
		m.Headers = map[string]string{"trace": "same"}
	case 2:
		m.Headers = map[string]string{"trace": fmt.Sprint(i), "escaped": "\"\n"}
	}
	if i%11 == 0 {
		m.Payload = nil
	}
	return m
}

// stored is what becomes of a message on its way.
func stored(m Message) Message {
	m.Channel = DefaultChannel
	if m.Payload == nil {
		m.Payload = []byte{}
	}
	return m
}

// eachMode runs a test on a link of every mode that a relay's connections may have.
func eachMode(t *testing.T, run func(t *testing.T, db *testenv.DB, s contractStore)) {
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db, s := newPostgresStore(t, time.Hour)
			cfg := db.Pool.Config()
			cfg.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			must(t, err)
			t.Cleanup(pool.Close)
			own, closeStore, err := openPostgres(t.Context(), pool, RelayConfig{}.withDefaults())
			must(t, err)
			t.Cleanup(closeStore)
			s.store = own
			s.link, err = own.connect(t.Context())
			must(t, err)
			t.Cleanup(s.link.close)
			run(t, db, s)
		})
	}
}

// What a poll has read stays as it was while the polls after it read other messages into the same memory, for whoever has copied
// the records, as the lane does for a publisher: nothing of a row is that of the row beside it, or of a later one.
func TestRecordsOutliveThePollsAfterThem(t *testing.T) {
	t.Parallel()
	eachMode(t, recordsOutlivePolls)
}

func recordsOutlivePolls(t *testing.T, _ *testenv.DB, s contractStore) {
	const n, page = 300, 3
	want := make([]Message, n)
	for i := range want {
		want[i] = stored(variety(i))
		s.enqueue(t, true, variety(i))()
	}
	for _, bytes := range []int64{1 << 30, 1} { // the second asks PollBounded
		got := make(map[int64]Record)
		floors := make([]int64, shards)
		for more := true; more; {
			var from []cursor
			for i, floor := range floors {
				from = append(from, cursor{int16(i), floor, page})
			}
			rows, err := s.link.poll(t.Context(), from, bytes)
			must(t, err)
			more = len(rows) > 0
			for _, r := range rows {
				got[r.Position], floors[r.shard] = r.Record, r.id
				if r.bad != nil || r.deferred || r.deadly || r.Attempt != 1 || !r.place.Valid {
					t.Errorf("row %+v", r)
				}
			}
		}
		var messages []Message
		for _, p := range slices.Sorted(maps.Keys(got)) {
			m := got[p].Message
			m.ID = want[0].ID
			messages = append(messages, m)
		}
		if diff := gocmp.Diff(want, messages); diff != "" {
			t.Errorf("with a bound of %d bytes (-enqueued +kept):\n%s", bytes, diff)
		}
	}
}

// A row that cannot be read says nothing of the rows beside it.
func TestABadRowIsBadAlone(t *testing.T) {
	t.Parallel()
	db, s := newPostgresStore(t, contractLease)
	_, err := db.Pool.Exec(t.Context(), "alter table commitbox.outbox_message disable trigger outbox_check")
	must(t, err)
	for i, headers := range []string{`{}`, `{"a": "b"}`, `{"a": 1}`, `{"a": "b"}`, `[]`, `[]`, `{}`, `{"a": "b"}`} {
		_, err := db.Pool.Exec(t.Context(), `insert into commitbox.outbox_message (shard, message_id, channel, topic, headers, payload)
			values (0, gen_random_uuid(), 'default', 't', $1, $2)`, headers, []byte(fmt.Sprint(i)))
		must(t, err)
	}
	rows := s.poll(t, 100, 1<<20, 0)
	var bad []string
	for _, r := range rows {
		if r.bad != nil {
			bad = append(bad, string(r.Payload))
		} else if r.Headers["a"] != map[bool]string{true: "b"}[slices.Contains([]string{"1", "3", "7"}, string(r.Payload))] {
			t.Errorf("row %s has headers %v", r.Payload, r.Headers)
		}
	}
	if diff := gocmp.Diff([]string{"2", "4", "5"}, bad); diff != "" || len(rows) != 8 {
		t.Errorf("%d rows (-bad +found):\n%s", len(rows), diff)
	}
}

// What was read and settled is not held on to until something else is read.
func TestNothingIsPinnedBetweenRounds(t *testing.T) {
	t.Parallel()
	_, s := newPostgresStore(t, time.Hour)
	p := &sends{refuse: map[string]bool{"head": true}}
	relay := stepwise(t, s.store, p, RelayConfig{BackoffBase: time.Hour, BackoffMax: time.Hour})
	relay.steps(t, 3)
	s.put(t, "blocked", "head", "behind")
	relay.steps(t, 8)
	s.put(t, "blocked", "further behind")
	s.put(t, "free", "sent")
	for i := 0; i < 50 && !p.has("sent"); i++ {
		relay.steps(t, 1)
	}
	l := relay.lanes[0]
	for what, rows := range map[string][]row{"the link's": l.link.(*postgresLink).hot.rows[:cap(l.link.(*postgresLink).hot.rows)], "the lane's": l.free[:cap(l.free)]} {
		if len(rows) == 0 {
			t.Errorf("%s memory was never used", what)
		}
		for _, r := range rows {
			if r.Payload != nil || r.Headers != nil || r.Key != "" {
				t.Errorf("%s memory still holds %q", what, r.Payload)
			}
		}
	}
}

func TestAPollLetsGoOfTheOneBefore(t *testing.T) {
	t.Parallel()
	_, s := newPostgresStore(t, contractLease)
	s.put(t, "k", "1", "2", "3", "4")
	before := len(s.poll(t, 10, 1<<20, 0))
	after := len(s.poll(t, 10, 1<<20, 3))
	rows := s.link.(*postgresLink).hot.rows
	for _, r := range rows[len(rows):cap(rows)] {
		if r.Payload != nil {
			t.Errorf("%s is still held", r.Payload)
		}
	}
	if before != 4 || after != 1 {
		t.Errorf("polls of %d and %d rows", before, after)
	}
}
