package scheduler_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/scheduler"
)

func init() {
	children["cleanup"] = func(ctx context.Context, pool *pgxpool.Pool) error {
		c, err := scheduler.NewCleanup(pool, scheduler.CleanupConfig{Logger: quiet, StatementTimeout: time.Minute, LockTimeout: time.Minute})
		if err != nil {
			return err
		}
		_, err = c.RunOnce(ctx)
		return err
	}
}

// handlings are the ways in which a copy of a message is handled.
var handlings = map[string]func(context.Context, *pgxpool.Pool, inbox.ID) (inbox.Outcome, error){
	"Process": func(ctx context.Context, pool *pgxpool.Pool, id inbox.ID) (inbox.Outcome, error) {
		box, err := inbox.New(pool, inbox.Config{Logger: quiet})
		if err != nil {
			return 0, err
		}
		got, err := inbox.Process(ctx, box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			return inbox.Void{}, effect(ctx, tx, id)
		})
		return got.Outcome, err
	},
	"Handle": func(ctx context.Context, pool *pgxpool.Pool, id inbox.ID) (outcome inbox.Outcome, err error) {
		return outcome, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			got, err := inbox.Handle(ctx, tx, id, func(ctx context.Context) (inbox.Void, error) { return inbox.Void{}, effect(ctx, tx, id) })
			outcome = got.Outcome
			return err
		})
	},
}

func effect(ctx context.Context, tx pgx.Tx, id inbox.ID) error {
	_, err := tx.Exec(ctx, `insert into effect values ($1)`, id.Message)
	return err
}

// held stops whoever removes an inbox row at the end of the statement, until release. Before that, waiters says how many sessions
// wait for such a one.
func (r *rooms) held() (waiters func() int, release func()) {
	r.t.Helper()
	r.exec(`create table effect (id text);
		create function hold() returns trigger language plpgsql as $$ begin perform pg_advisory_xact_lock_shared(1); return null; end $$;
		create trigger hold after delete on commitbox.inbox for each statement execute function hold()`)
	conn, err := r.Pool.Acquire(context.Background())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(conn.Release)
	if _, err := conn.Exec(context.Background(), `select pg_advisory_lock(1)`); err != nil {
		r.t.Fatal(err)
	}
	waiters = func() int {
		return r.count(`select count(*) from pg_stat_activity a where a.datname = current_database()
			and exists (select from unnest(pg_blocking_pids(a.pid)) b join pg_locks l on l.pid = b and l.locktype = 'advisory' and not l.granted and l.objid = 1)`)
	}
	release = sync.OnceFunc(func() {
		if _, err := conn.Exec(context.Background(), `select pg_advisory_unlock(1)`); err != nil {
			r.t.Error(err)
		}
	})
	r.t.Cleanup(release)
	return waiters, release
}

const removing = `select pid from pg_locks where locktype = 'advisory' and objid = 1 and not granted
	and database = (select oid from pg_database where datname = current_database())`

// Copies that arrive while a batch has removed their rows and not committed wait for its end, and for no longer: then they run,
// or are replayed if the cleaner has died. A second copy is answered at once.
func TestP13_CopiesWaitForTheBatchThatRemovesTheirRows(t *testing.T) {
	for name, handle := range handlings {
		for _, dies := range []bool{false, true} {
			t.Run(fmt.Sprint(name, ", the cleaner dies: ", dies), func(t *testing.T) {
				r := newRooms(t)
				const rows = 6
				r.completed(rows)
				waiters, release := r.held()
				var group sync.WaitGroup
				group.Go(func() {
					_, err := r.cleanup(r.Pool, scheduler.CleanupConfig{StatementTimeout: time.Minute, LockTimeout: time.Minute}).RunOnce(t.Context())
					if (err != nil) != dies {
						t.Error(err)
					}
				})
				eventually(t, "the batch", func() bool { return r.count(`select count(*) from (`+removing+`) x`) == 1 })
				want := inbox.Executed
				if dies {
					want = inbox.Replayed
				}
				for n := range rows {
					group.Go(func() {
						got, err := handle(t.Context(), r.Pool, inbox.ID{Consumer: "a", Message: fmt.Sprint("m", n+1)})
						if err != nil || got != want {
							t.Errorf("%v, %v; want %v", got, err, want)
						}
					})
				}
				eventually(t, "waiting copies", func() bool { return waiters() == rows })
				if got, err := handle(t.Context(), r.Pool, inbox.ID{Consumer: "a", Message: "m1"}); err != nil || got != inbox.Replayed {
					t.Errorf("a second copy: %v, %v", got, err)
				}
				if dies {
					r.exec(`select pg_terminate_backend(pid) from (` + removing + `) x`)
				}
				release()
				group.Wait()
				effects := map[bool]int{false: rows, true: 0}[dies]
				if n, left := r.count(`select count(*) from effect`), r.count(`select count(*) from commitbox.inbox`); n != effects || left != rows {
					t.Errorf("%d effects, %d rows", n, left)
				}
			})
		}
	}
}

// before calls do once, right before a client sends a statement of a name.
type before struct {
	name string
	once sync.Once
	do   func()
}

func (b *before) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		if strings.Contains(q.SQL, "name: "+b.name+" ") {
			b.once.Do(b.do)
		}
	}
	return ctx
}
func (*before) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (*before) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
func (*before) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (*before) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// The claim runs into a row that is over, and before it is read the row has gone: the message is claimed again, and runs.
func TestF20_ARowThatVanishesBetweenClaimAndLookIsClaimedAgain(t *testing.T) {
	for name, handle := range handlings {
		t.Run(name, func(t *testing.T) {
			r := newRooms(t)
			r.completed(1)
			r.exec(`create table effect (id text)`)
			c := r.cleanup(r.Pool, scheduler.CleanupConfig{})
			removed := int64(0)
			cfg := r.Pool.Config()
			cfg.ConnConfig.Tracer = &before{name: "InboxLook", do: func() { removed = r.clean(c).Completed }}
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			got, err := handle(t.Context(), pool, inbox.ID{Consumer: "a", Message: "m1"})
			if err != nil || got != inbox.Executed || removed != 1 || r.count(`select count(*) from effect`) != 1 {
				t.Errorf("%v, %v; %d rows removed in between, %d effects", got, err, removed, r.count(`select count(*) from effect`))
			}
		})
	}
}

// Copies arrive all the time while their rows are removed: each is answered, and runs once at most.
func TestP13_CopiesThatArriveWhileTheirRowsAreRemoved(t *testing.T) {
	r := newRooms(t)
	const rows = 200
	r.completed(rows)
	r.exec(`create table effect (id text);
		create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.001); return null; end $$;
		create trigger slow after delete on commitbox.inbox for each row execute function slow()`)
	var over atomic.Bool
	var during atomic.Int64
	var group sync.WaitGroup
	for _, handle := range handlings {
		for range 2 {
			group.Go(func() {
				for !over.Load() {
					got, err := handle(t.Context(), r.Pool, inbox.ID{Consumer: "a", Message: fmt.Sprint("m", 1+rand.IntN(rows))})
					if err != nil && !strings.Contains(err.Error(), inbox.ErrInProgress.Error()) {
						t.Error(err)
					}
					if got == inbox.Executed && !over.Load() {
						during.Add(1)
					}
				}
			})
		}
	}
	got := r.clean(r.cleanup(r.Pool, scheduler.CleanupConfig{Batch: 20}))
	over.Store(true)
	group.Wait()
	effects, twice := r.count(`select count(*) from effect`), r.count(`select count(*) - count(distinct id) from effect`)
	t.Logf("%d copies ran while rows were removed, %d in all", during.Load(), effects)
	if got.Completed != rows || twice != 0 || effects != r.count(`select count(*) from commitbox.inbox`) || during.Load() == 0 {
		t.Errorf("%+v, %d effects, %d of them twice", got, effects, twice)
	}
}

// The process of a cleaner is killed while its batch has removed rows and not committed: they are all back.
func TestP13_AKilledCleanerLeavesWhatItHadNotCommitted(t *testing.T) {
	r := newRooms(t)
	r.fill()
	_, release := r.held()
	child := startChild(t, "cleanup", r.DB)
	eventually(t, "the batch", func() bool { return r.count(`select count(*) from (`+removing+`) x`) == 1 })
	child.signal(syscall.SIGKILL)
	<-child.ended
	release()
	r.checkNothingIsHeld()
	if n := r.count(`select count(*) from commitbox.inbox where message_id like 'gone%'`); n != wantReportRemoved {
		t.Errorf("%d rows that are over, want %d", n, wantReportRemoved)
	}
	r.clean(r.cleanup(r.Pool, scheduler.CleanupConfig{}))
	r.checkLeft()
}

var wantReportRemoved = int(wantReport.Completed + wantReport.Dead)

// A run as a role whose statements end after a fraction of a second goes by its own limits, and gets on in any case.
func TestB50_TheRolesStatementTimeoutStopsNothing(t *testing.T) {
	r := newRooms(t)
	const rows = 400
	r.completed(rows)
	r.exec(`create function slow() returns trigger language plpgsql as $$ begin perform pg_sleep(0.0001); return null; end $$;
		create trigger slow after delete on commitbox.inbox for each row execute function slow()`)
	cfg := r.Pool.Config()
	cfg.ConnConfig.RuntimeParams["statement_timeout"], cfg.ConnConfig.RuntimeParams["lock_timeout"] = "50", "50"
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	var inserts []time.Duration
	stop := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		for n := 0; ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			start := time.Now()
			r.exec(`insert into commitbox.inbox (consumer, message_id, status, finished_at) values ('a', $1, 'completed', clock_timestamp())`, fmt.Sprint("new", n))
			inserts = append(inserts, time.Since(start))
		}
	})
	c := r.cleanup(pool, scheduler.CleanupConfig{Batch: 5000, Budget: 300 * time.Millisecond})
	runs := 0
	for left := rows; left > 0; runs++ {
		got := r.clean(c)
		if got.Completed == 0 || runs > 100 {
			t.Fatalf("run %d removed nothing of %d: %+v", runs, left, got)
		}
		left -= int(got.Completed)
	}
	close(stop)
	group.Wait()
	slices.Sort(inserts)
	p99 := inserts[len(inserts)*99/100]
	t.Logf("%d runs; p99 of %d inserts: %v", runs, len(inserts), p99)
	if p99 > time.Second {
		t.Errorf("p99 of an insert: %v", p99)
	}
}
