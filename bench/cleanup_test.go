package bench

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/migrate"
	"github.com/commitbox/commitbox/scheduler"
)

// fillAged stores completed messages that ended over a time up to some days ago, the oldest first, as they would lie there.
func fillAged(b *testing.B, pool *pgxpool.Pool, schema, prefix string, rows int, from, to time.Duration) {
	b.Helper()
	now := time.Now()
	_, err := pool.CopyFrom(b.Context(), pgx.Identifier{schema, "inbox"}, []string{"consumer", "message_id", "status", "attempts", "finished_at"},
		pgx.CopyFromSlice(rows, func(i int) ([]any, error) {
			age := from - time.Duration(float64(from-to)*float64(i)/float64(rows))
			return []any{consumer, fmt.Sprint(prefix, i), "completed", 1, now.Add(-age)}, nil
		}))
	if err != nil {
		b.Fatal(err)
	}
}

const benchDay = 24 * time.Hour

// cleaned removes what is over and returns how many rows that was.
func cleaned(b *testing.B, pool *pgxpool.Pool, cfg scheduler.CleanupConfig) int64 {
	b.Helper()
	cfg.Budget, cfg.Logger = time.Hour, slog.New(slog.DiscardHandler)
	c, err := scheduler.NewCleanup(pool, cfg)
	if err != nil {
		b.Fatal(err)
	}
	report, err := c.RunOnce(b.Context())
	if err != nil || !report.Finished {
		b.Fatalf("%+v, %v", report, err)
	}
	return report.Completed
}

// BenchmarkCleanupBesideWorkers measures what the removal of expired rows does to workers that process messages, some of them
// copies of what is being removed: the 99th percentile of their calls, and lock waits of more than 50 ms behind the cleaner.
func BenchmarkCleanupBesideWorkers(b *testing.B) {
	db := startDatabase(b)
	const workers = 16
	pool, admin := db.pool(b, workers), db.pool(b, 2)
	expired, rows := sized(2_000, 100_000, 1_000_000), sized(20_000, 1_000_000, 10_000_000)
	alone := sized(500*time.Millisecond, 5*time.Second, 20*time.Second)
	for _, setting := range []string{"log_lock_waits = on", "deadlock_timeout = '50ms'"} {
		run(b, admin, "alter system set "+setting)
	}
	run(b, admin, "select pg_reload_conf()")
	fillAged(b, admin, "commitbox", "kept", rows-expired, 6*benchDay, time.Hour)
	run(b, admin, "vacuum (analyze) commitbox.inbox")
	box := newInbox(b, pool, "")
	latency := func(during func()) []float64 {
		stop := make(chan struct{})
		var group sync.WaitGroup
		group.Go(func() { during(); close(stop) })
		times := callUntil(b, stop, workers, func(ctx context.Context) error {
			id := messageID()
			if rand.IntN(50) == 0 {
				id = fmt.Sprint("over", rand.IntN(expired))
			}
			return process(ctx, box, id)
		})
		group.Wait()
		return times
	}
	const without, with = "workers alone", "beside the cleaner"
	f := figures{names: []string{without, with}, samples: map[string][]float64{}}
	waits, took := 0, 0.0
	for range min(3, rounds(b)) {
		run(b, admin, "delete from commitbox.inbox where message_id like 'over%'")
		fillAged(b, admin, "commitbox", "over", expired, 9*benchDay, 8*benchDay)
		run(b, admin, "vacuum (analyze) commitbox.inbox")
		run(b, admin, "checkpoint")
		f.samples[without] = append(f.samples[without], quantile(latency(func() { time.Sleep(alone) }), 0.99))
		before, pids := logLength(b, admin), new(pidSet)
		f.samples[with] = append(f.samples[with], quantile(latency(func() {
			start := time.Now()
			cleaned(b, pids.watch(b, db), scheduler.CleanupConfig{})
			took = time.Since(start).Seconds()
		}), 0.99))
		waits += pids.blocked(b, admin, before)
	}
	r := newReport(b, db, "Cleanup: expired rows removed beside workers, p99 of Process",
		fmt.Sprintf("%d of %d rows expired, %d workers, 1 of 50 messages a copy of an expired one, %d rounds", expired, rows, workers, len(f.samples[with])))
	r.figures("ms", f)
	r.atMost("beside / alone", f.ratio(with, without), 1.5)
	r.atMost("lock waits over 50 ms", float64(waits), 0)
	r.noted("seconds for all", took)
	r.print()
}

// callUntil calls do from a number of workers until stop is closed, and returns the times in milliseconds.
func callUntil(b *testing.B, stop <-chan struct{}, workers int, do func(context.Context) error) []float64 {
	var mu sync.Mutex
	var times []float64
	var group sync.WaitGroup
	for range workers {
		group.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				start := time.Now()
				if err := do(b.Context()); err != nil {
					b.Error(err)
					return
				}
				took := milliseconds(time.Since(start))
				mu.Lock()
				times = append(times, took)
				mu.Unlock()
			}
		})
	}
	group.Wait()
	return times
}

// pidSet is the sessions of the cleaner.
type pidSet struct{ pids sync.Map }

// watch returns a pool whose connections are noted, those of pools that are made after it too.
func (s *pidSet) watch(b *testing.B, db *database) *pgxpool.Pool {
	return db.pool(b, 2, func(cfg *pgxpool.Config) {
		cfg.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
			s.pids.Store(fmt.Sprint(conn.PgConn().PID()), true)
			return nil
		}
	})
}

// serverLog is where the launcher puts what the server writes.
const serverLog = "current_setting('data_directory') || '/../log'"

func logLength(b *testing.B, pool *pgxpool.Pool) int {
	return count(b, pool, "select size from pg_stat_file("+serverLog+")")
}

var holders = regexp.MustCompile(`still waiting for [^\n]*\n[^\n]*Process(?:es)? holding the lock: ([\d, ]+)`)

// blocked counts the lock waits over deadlock_timeout in the log whose lock a session of the cleaner held.
func (s *pidSet) blocked(b *testing.B, pool *pgxpool.Pool, from int) (n int) {
	var text string
	if err := pool.QueryRow(b.Context(), "select pg_read_file("+serverLog+", $1, 1000000000)", from).Scan(&text); err != nil {
		b.Fatal(err)
	}
	for _, wait := range holders.FindAllStringSubmatch(text, -1) {
		for _, pid := range regexp.MustCompile(`\d+`).FindAllString(wait[1], -1) {
			if _, ours := s.pids.Load(pid); ours {
				n++
			}
		}
	}
	return n
}

// BenchmarkCleanupSize measures whether the table and its indexes stay as large as they are after the first of ten cycles of
// inserts and removal, with the autovacuum settings of the migration; the vacuum is awaited.
func BenchmarkCleanupSize(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 4)
	rows, cycles := sized(20_000, 100_000, 1_000_000), 10
	run(b, pool, "alter system set autovacuum_naptime = '1s'")
	run(b, pool, "select pg_reload_conf()")
	f := figures{names: []string{"first cycle", "last cycle"}, samples: map[string][]float64{}}
	for cycle := range cycles {
		fillAged(b, pool, "commitbox", fmt.Sprint("cycle ", cycle, " "), rows, 9*benchDay, 8*benchDay)
		if got := cleaned(b, pool, scheduler.CleanupConfig{Pause: time.Millisecond}); got != int64(rows) {
			b.Fatalf("%d rows removed of %d", got, rows)
		}
		awaitVacuum(b, pool)
		size := float64(count(b, pool, "select pg_total_relation_size('commitbox.inbox')")) / (1 << 20)
		if cycle == 0 {
			f.samples["first cycle"] = []float64{size}
		}
		f.samples["last cycle"] = []float64{size}
	}
	r := newReport(b, db, "Cleanup: size of the table and its indexes",
		fmt.Sprintf("%d cycles of %d inserts and their removal, autovacuum awaited in between", cycles, rows))
	r.figures("MiB", f)
	r.atMost("last / first", f.ratio("last cycle", "first cycle"), 1.5)
	r.print()
}

// awaitVacuum waits for an autovacuum that began after now.
func awaitVacuum(b *testing.B, pool *pgxpool.Pool) {
	b.Helper()
	const left = `select count(*) from pg_stat_all_tables where relid = 'commitbox.inbox'::regclass and n_dead_tup > 50 + 0.02 * n_live_tup`
	for deadline := time.Now().Add(5 * time.Minute); ; time.Sleep(200 * time.Millisecond) {
		time.Sleep(time.Second) // statistics are late
		if count(b, pool, left)+count(b, pool, "select count(*) from pg_stat_progress_vacuum") == 0 {
			return
		}
		if time.Now().After(deadline) {
			b.Fatal("no autovacuum came")
		}
	}
}

// BenchmarkCleanupIndex compares what may serve the removal, after a churn that puts new rows where old ones were: the index of
// the migration, and a BRIN index, which is smaller and does not know an order.
func BenchmarkCleanupIndex(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 4)
	rows, churns := sized(10_000, 300_000, 3_000_000), 10
	var prefix atomic.Int64
	indexed := func(schema, index string) {
		if err := migrate.Up(b.Context(), pool, migrate.Config{Schema: schema}); err != nil {
			b.Fatal(err)
		}
		run(b, pool, "drop index "+schema+".inbox_ended_at")
		run(b, pool, "create index on "+schema+".inbox using "+index)
		fillAged(b, pool, schema, "start", rows, 6*benchDay, time.Hour)
		for range churns { // a tenth gets over and is replaced
			churn(b, pool, schema, rows/10, &prefix)
		}
	}
	indexed("btree", "btree (consumer, status, finished_at) where finished_at is not null")
	indexed("brin", "brin (finished_at) with (pages_per_range = 32, autosummarize = on)")
	seconds := func(schema string, over int) contender {
		name := fmt.Sprintf("%s, %d rows over", schema, over)
		return contender{name, func(b *testing.B) float64 {
			fillAged(b, pool, schema, fmt.Sprint("over", prefix.Add(1), " "), over, 9*benchDay, 8*benchDay)
			run(b, pool, "vacuum (analyze) "+schema+".inbox")
			start := time.Now()
			cleaned(b, pool, scheduler.CleanupConfig{Schema: schema, Pause: time.Microsecond})
			return time.Since(start).Seconds()
		}}
	}
	f := interleave(b, min(3, rounds(b)), seconds("btree", 0), seconds("brin", 0), seconds("btree", rows/10), seconds("brin", rows/10))
	r := newReport(b, db, "Cleanup: B-tree against BRIN after churn", fmt.Sprintf("%d rows, %d times a tenth removed and replaced", rows, churns))
	r.figures("s", f)
	size := func(schema string) float64 {
		return float64(count(b, pool, `select sum(pg_relation_size(indexrelid))::bigint from pg_index i join pg_class c on c.oid = i.indexrelid
			where indrelid = ($1 || '.inbox')::regclass and c.relname like 'inbox%finished_at%'`, schema)) / (1 << 20)
	}
	r.noted("btree MiB", size("btree"))
	r.noted("brin MiB", size("brin"))
	r.noted("brin / btree, nothing over", f.ratio("brin, 0 rows over", "btree, 0 rows over"))
	r.noted("brin / btree, a tenth over", f.ratio(fmt.Sprintf("brin, %d rows over", rows/10), fmt.Sprintf("btree, %d rows over", rows/10)))
	r.print()
}

// churn removes some random rows and puts new ones in their place, which are as old as any.
func churn(b *testing.B, pool *pgxpool.Pool, schema string, rows int, prefix *atomic.Int64) {
	b.Helper()
	run(b, pool, "delete from "+schema+".inbox where ctid = any (array(select ctid from "+schema+".inbox order by random() limit $1))", rows)
	run(b, pool, "vacuum (analyze) "+schema+".inbox")
	fillAged(b, pool, schema, fmt.Sprint("new", prefix.Add(1), " "), rows, 6*benchDay, time.Hour)
}
