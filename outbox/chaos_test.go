package outbox_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// soak is how much longer the long forms of tests run.
func soak(normal, long time.Duration) time.Duration {
	if os.Getenv("COMMITBOX_SOAK") != "" {
		return long
	}
	return normal
}

// Every business transaction appends to its key's list and enqueues what it appended. Whatever happens to four relays,
// the lists that their broker saw first must be the lists in the database.
func TestP2_P8_KeyLogSurvivesKillsAndPauses(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	const keys, writers, relays = 1000, 8, 4
	if _, err := db.Pool.Exec(t.Context(), brokerTable+`; create table log (key text primary key, n int not null default 0)`); err != nil {
		t.Fatal(err)
	}
	if _, err := db.Pool.Exec(t.Context(), "insert into log select 'k' || g from generate_series(0, $1::int - 1) g", keys); err != nil {
		t.Fatal(err)
	}
	processes := make([]*relayProcess, relays)
	for i := range processes {
		processes[i] = startProcess(t, db, 3)
	}
	var writing sync.WaitGroup
	var done atomic.Bool
	for range writers {
		writing.Go(func() {
			for !done.Load() {
				if err := append1(t, db, fmt.Sprint("k", zipf(keys))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	stopped := make([]time.Time, relays)
	for deadline := time.Now().Add(soak(12*time.Second, 10*time.Minute)); time.Now().Before(deadline); time.Sleep(150 * time.Millisecond) {
		i, dice := rand.IntN(relays), rand.IntN(9)
		switch p := processes[i]; {
		case !p.alive():
			processes[i] = startProcess(t, db, 3)
		case !stopped[i].IsZero():
			if time.Since(stopped[i]) > 1500*time.Millisecond { // past the lease
				p.signal(syscall.SIGCONT)
				stopped[i] = time.Time{}
			}
		case dice < 3:
			p.signal(syscall.SIGKILL)
		case dice < 5:
			p.signal(syscall.SIGSTOP)
			stopped[i] = time.Now()
		}
	}
	done.Store(true)
	writing.Wait()
	for i, p := range processes {
		p.signal(syscall.SIGCONT)
		if !p.alive() {
			processes[i] = startProcess(t, db, 3)
		}
	}
	want, total := map[string][]string{}, 0
	rows, _ := db.Pool.Query(t.Context(), "select key, n from log where n > 0")
	var key string
	var n int
	if _, err := pgx.ForEachRow(rows, []any{&key, &n}, func() error {
		for i := range n {
			want[key] = append(want[key], fmt.Sprint(i+1))
		}
		total += n
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	// The writers left as many as they could, and the busiest key goes one by one: 19 s on a machine that others use too.
	eventuallyWithin(t, time.Minute, "every message to be confirmed", func() bool { return tables(t, db) == settled })
	got := map[string][]string{}
	published := 0
	rows, _ = db.Pool.Query(t.Context(), "select key, payload from broker order by n")
	var payload string
	if _, err := pgx.ForEachRow(rows, []any{&key, &payload}, func() error {
		published++
		if !slices.Contains(got[key], payload) {
			got[key] = append(got[key], payload)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d messages, %d copies", total, published-total)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("lists by key (-database +broker):\n%s", diff)
	}
}

// zipf picks small numbers more often, so that some keys are busy.
func zipf(n int) int { return int(float64(n) * rand.Float64() * rand.Float64() * rand.Float64()) }

func append1(t *testing.T, db *testenv.DB, key string) error {
	return pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
		var n int
		if err := tx.QueryRow(t.Context(), "update log set n = n + 1 where key = $1 returning n", key).Scan(&n); err != nil {
			return err
		}
		_, err := outbox.Enqueue(t.Context(), tx, message(key, fmt.Sprint(n)))
		if rand.IntN(10) == 0 {
			time.Sleep(rand.N(30 * time.Millisecond))
		}
		return err
	})
}

func TestH2_AMessageThatKillsItsRelayIsFoundOut(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), brokerTable); err != nil {
		t.Fatal(err)
	}
	for i := range 50 {
		enqueue(t, db, message(fmt.Sprint("k", i), "before"))
	}
	enqueue(t, db, message("bad", poison), message("bad", "behind it"))
	for i := range 50 {
		enqueue(t, db, message(fmt.Sprint("k", i), "after"))
	}
	deaths := 0
	p := startProcess(t, db, 0)
	t.Cleanup(func() {
		if t.Failed() {
			var state string
			_ = db.Pool.QueryRow(context.Background(), `select format('shard %s; deferred %s; dead %s',
				(select string_agg(s::text, ' ') from commitbox.outbox_shard s where shard = commitbox.outbox_shard_of('bad')),
				(select string_agg(format('%s %s %s', id, attempts, last_error), ', ') from commitbox.outbox_deferred),
				(select string_agg(format('%s %s %s', id, attempts, last_error), ', ') from commitbox.outbox_dead))`).Scan(&state)
			t.Logf("%d deaths, alive %v, %s\n%s\n%s", deaths, p.alive(), tables(t, db), state, p.stderr.String())
		}
	})
	eventuallyWithin(t, 4*time.Minute, "the poison to be dead", func() bool {
		if !p.alive() {
			deaths++
			p = startProcess(t, db, 0)
		}
		return count(t, db, "select count(*) from commitbox.outbox_dead where last_error like '%died while publishing%'") > 0
	})
	eventually(t, "everything else", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	if n := count(t, db, "select count(distinct (key, payload)) from broker"); n != 101 {
		t.Errorf("%d messages got through, want 101", n)
	}
	if deaths < 4 {
		t.Errorf("%d relays died, want at least 4: one to start with, one for each of three attempts", deaths)
	}
	t.Logf("%d relays died", deaths)
}
