package scheduler_test

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
	"github.com/commitbox/commitbox/scheduler"
)

// newPrivateRooms is a database on a server that the test may kill.
func newPrivateRooms(t *testing.T) (*rooms, *devserver.Server) {
	t.Helper()
	server := testenv.PrivatePostgres(t, devserver.PostgresOptions{Durable: true})
	pool, err := pgxpool.New(t.Context(), server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := migrate.Up(t.Context(), pool, migrate.Config{}); err != nil {
		t.Fatal(err)
	}
	return &rooms{&testenv.DB{Name: "postgres", URL: server.URL(), Pool: pool}, t}, server
}

// at calls do at the n-th statement of a run that contains text: before it is sent, or after its answer has come.
type at struct {
	text  string
	n     int64
	after bool
	do    func()

	seen, ended atomic.Int64
}

func (a *at) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	if !strings.Contains(data.SQL, a.text) {
		return ctx
	}
	n := a.seen.Add(1)
	if n == a.n && !a.after {
		a.do()
	}
	return context.WithValue(ctx, a, n)
}

func (a *at) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryEndData) {
	if n, ok := ctx.Value(a).(int64); ok && n == a.n && a.after {
		if data.Err == nil {
			a.ended.Add(1)
		}
		a.do()
	}
}

// killed kills every process of the server and starts it again on its data, as after a crash of its machine.
func (r *rooms) killed(server *devserver.Server) {
	r.t.Helper()
	if err := server.Kill(); err != nil {
		r.t.Error(err)
	}
}

func (r *rooms) restarted(server *devserver.Server) {
	r.t.Helper()
	if err := server.Restart(context.Background()); err != nil {
		r.t.Fatal(err)
	}
	r.Pool.Reset()
}

// The server is killed under a cleaner. The run ends with an error, the server recovers with no row that had to be kept gone and
// none in between, and the next run of the same cleaner finishes.
func TestP13_AServerMayDieUnderACleaner(t *testing.T) {
	t.Parallel()
	r, server := newPrivateRooms(t)
	for name, moment := range map[string]*at{
		"it leads":                      {text: "CleanupLead", n: 1, after: true},
		"a failed row is dead":          {text: "commit", n: 4, after: true},
		"before a batch is committed":   {text: "commit", n: 5},
		"a batch was committed":         {text: "commit", n: 5, after: true},
		"before messages are forgotten": {text: "CleanupDiscarded", n: 1, after: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := &rooms{r.DB, t}
			r.fill()
			moment.do = func() { r.killed(server) }
			cfg := r.Pool.Config()
			cfg.ConnConfig.Tracer = moment
			pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
			if err != nil {
				t.Fatal(err)
			}
			defer pool.Close()
			c := r.cleanup(pool, scheduler.CleanupConfig{Batch: 12})
			report, err := c.RunOnce(context.Background())
			if err == nil || report.Finished {
				t.Errorf("%+v, %v", report, err)
			}
			if moment.after && moment.ended.Load() != 1 {
				t.Error("the server died before the answer")
			}
			r.restarted(server)
			r.checkNothingIsHeld()
			if dead, told := r.count(`select count(distinct consumer) from commitbox.inbox where message_id like 'dead failed%' and status = 'dead'`),
				r.count(`select count(*) from commitbox.audit where action = 'inbox_abandon'`); dead != told {
				t.Errorf("failed rows of %d consumers are dead, audit tells of %d", dead, told)
			}
			r.clean(c)
			r.checkLeft()
		})
	}
}

// The server is killed in the middle of the statement that removes rows, and is away for a while. The scheduler waits for it, and
// its next ticks finish what was begun.
func TestP13_ASchedulerGoesOnAfterTheServerHasDied(t *testing.T) {
	t.Parallel()
	r, server := newPrivateRooms(t)
	r.fill()
	r.exec(`create function hold() returns trigger language plpgsql as $$
		begin if exists (select from gone where status = 'dead') then perform pg_sleep(600); end if; return null; end $$;
		create trigger hold after delete on commitbox.inbox referencing old table as gone for each statement execute function hold()`)
	job := r.cleanup(r.Pool, scheduler.CleanupConfig{StatementTimeout: time.Hour}).Job()
	job.Spec, job.Jitter = "@every 200ms", 0
	s, err := scheduler.New(r.Pool, []scheduler.Job{job}, scheduler.Config{Lease: time.Second, Poll: 50 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	eventually(t, "a batch that has removed rows", func() bool {
		return r.count(`select count(*) from pg_stat_activity where wait_event = 'PgSleep'`) == 1
	})
	if n := r.count(`select count(*) from commitbox.inbox where message_id like 'gone completed%'`); n == wantReportRemoved {
		t.Error("no batch was committed before")
	}
	r.killed(server)
	r.restarted(server)
	if dead := r.count(`select count(*) from commitbox.inbox where message_id like 'gone dead%'`); dead != int(wantReport.Dead) {
		t.Errorf("%d dead rows are back, want %d", dead, wantReport.Dead)
	}
	r.exec(`drop trigger hold on commitbox.inbox`)
	eventually(t, "a run that finishes", func() bool {
		return statuses(t, s)["cleanup"].Outcome == "succeeded" && r.count(`select count(*) from commitbox.inbox where message_id like 'gone%'`) == 0
	})
	r.checkLeft()
}
