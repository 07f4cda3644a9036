package scheduler

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// overdue returns a cleaner of a database with so many rows that are over.
func overdue(t *testing.T, rows int, cfg CleanupConfig) (*testenv.DB, *Cleanup) {
	t.Helper()
	db := testenv.Database(t)
	exec(t, db, `insert into commitbox.inbox (consumer, message_id, status, finished_at)
		select 'a', 'm' || n, 'completed', clock_timestamp() - make_interval(days => 8, secs => n) from generate_series(1, $1::int) n`, rows)
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c, err := NewCleanup(db.Pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return db, c
}

// A run rests after every batch that may not have been the last of its kind.
func TestACleanupPauses(t *testing.T) {
	t.Parallel()
	const pause, batches = 50 * time.Millisecond, 10
	_, c := overdue(t, 100, CleanupConfig{Batch: 100 / batches, Pause: pause})
	report, err := c.RunOnce(t.Context())
	if err != nil || report.Completed != 100 || report.Took < batches*pause {
		t.Errorf("%+v, %v", report, err)
	}
}

// While a run lasts its log says how far it is, and at its end what it did in all.
func TestACleanupTellsItsProgress(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	_, c := overdue(t, 100, CleanupConfig{Batch: 10, Pause: time.Microsecond, Logger: slog.New(slog.NewJSONHandler(&log, nil))})
	c.progress = 0
	if _, err := c.RunOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	var told []int64
	for lines := json.NewDecoder(&log); lines.More(); {
		var line struct {
			Msg    string
			Report struct{ Completed int64 }
		}
		if err := lines.Decode(&line); err != nil {
			t.Fatal(err)
		}
		told = append(told, line.Report.Completed)
		if last := !lines.More(); last != (line.Msg == "cleanup: done") || !last && line.Msg != "cleanup: goes on" {
			t.Errorf("%+v", line)
		}
	}
	if len(told) < 10 || told[1] == 0 || told[1] >= 100 || told[len(told)-1] != 100 {
		t.Errorf("told of %v rows", told)
	}
}

// An operator who has locked a table keeps a run from it, and from nothing else: the run says so and ends, and the next one goes on.
func TestB51_ALockedTableIsLeftToTheNextRun(t *testing.T) {
	t.Parallel()
	db, c := overdue(t, 100, CleanupConfig{LockTimeout: 20 * time.Millisecond, StatementTimeout: 5 * time.Second})
	exec(t, db, `insert into commitbox.outbox_channel (channel) values ('default')`)
	exec(t, db, `insert into commitbox.outbox_relay (owner, channel, lease_until) values (gen_random_uuid(), 'default', now() - interval '2 hours')`)
	operator, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer operator.Rollback(context.Background())
	if _, err := operator.Exec(t.Context(), `lock table commitbox.inbox in exclusive mode`); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	report, err := c.RunOnce(ctx)
	if err == nil || !strings.Contains(err.Error(), `completed rows of "a"`) || !strings.Contains(err.Error(), "55P03") {
		t.Errorf("%v", err)
	}
	if report.Finished || report.Completed != 0 || report.Gone != 1 {
		t.Errorf("%+v", report)
	}
	if rows := c.size(kindCompleted).rows; rows != 1 {
		t.Errorf("the next batch takes %d rows", rows)
	}
	operator.Rollback(t.Context())
	if report, err := c.RunOnce(t.Context()); err != nil || report.Completed != 100 || !report.Finished {
		t.Errorf("%+v, %v", report, err)
	}
	if rows := c.size(kindCompleted).rows; rows < 2 {
		t.Errorf("batches do not grow back: %d rows", rows)
	}
}

// Days of kept messages go when no channel keeps them any more.
func TestCleanupDropsDaysThatNoChannelKeeps(t *testing.T) {
	t.Parallel()
	db, c := overdue(t, 1, CleanupConfig{})
	exec(t, db, `insert into commitbox.outbox_channel (channel, keep_days) values ('brief', 0), ('long', 3)`)
	exec(t, db, `do $$
		declare day date;
		begin
			for day in select (now() at time zone 'UTC')::date - n from generate_series(1, 5) n loop
				execute format('create table commitbox.%I partition of commitbox.outbox_sent for values from (%L) to (%L)',
					'outbox_sent_' || to_char(day, 'YYYYMMDD'), day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC');
			end loop;
		end $$`)
	report, err := c.RunOnce(t.Context())
	if err != nil || report.DaysDropped != 2 || report.DaysMade != 8 {
		t.Errorf("%+v, %v", report, err)
	}
}

// A completer that panics, ends its goroutine or never returns keeps nothing from being removed, and is not called again while it has
// not returned.
func TestB73_NoCompleterStopsACleanup(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	var calls atomic.Int64
	db, c := overdue(t, 50, CleanupConfig{Budget: time.Second, Completers: map[string]func(context.Context) (int, error){
		"fails":   func(context.Context) (int, error) { return 2, errors.New("no") },
		"goexit":  func(context.Context) (int, error) { runtime.Goexit(); return 0, nil },
		"hangs":   func(context.Context) (int, error) { calls.Add(1); <-release; return 3, nil },
		"panics":  func(context.Context) (int, error) { panic("boom") },
		"unsound": func(context.Context) (int, error) { return 0, unsound{} },
		"well":    func(context.Context) (int, error) { return 4, nil },
	}})
	for run := range 2 {
		report, err := c.RunOnce(t.Context())
		for _, want := range []string{
			"completer of fails: no", "completer of goexit: the job ended", "completer of hangs: it has not returned", "completer of panics: the job panicked: boom",
			"completer of unsound: ",
		} {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("run %d does not tell that %q: %v", run, want, err)
			}
		}
		if report.Resumed != 2+4 || report.Finished {
			t.Errorf("run %d: %+v", run, report)
		}
	}
	if n := calls.Load(); n != 1 {
		t.Errorf("%d calls of a completer that has not returned", n)
	}
	var left int
	if err := db.Pool.QueryRow(t.Context(), `select count(*) from commitbox.inbox`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d rows are left, %v", left, err)
	}
	close(release)
	eventually(t, "the end of the call that hung", func() bool { return len(c.waiting["hangs"]) == 1 })
	if report, _ := c.RunOnce(t.Context()); report.Resumed != 2+3+4 || calls.Load() != 2 {
		t.Errorf("%+v, %d calls", report, calls.Load())
	}
}

// panicky is an observer that always panics.
type panicky struct{ n *atomic.Int64 }

func (p panicky) Observe(*commitbox.Metric, float64, ...string) {
	p.n.Add(1)
	panic(unsound{})
}

// An observer that panics ends neither the process nor a run.
func TestB73_NoObserverEndsTheProcess(t *testing.T) {
	t.Parallel()
	var seen, runs atomic.Int64
	db, c := overdue(t, 50, CleanupConfig{Observer: panicky{&seen}})
	if report, err := c.RunOnce(t.Context()); err != nil || report.Completed != 50 || seen.Load() == 0 {
		t.Errorf("%+v, %v, %d measurements", report, err, seen.Load())
	}
	seen.Store(0)
	cfg := quiet()
	cfg.Observer = panicky{&seen}
	_, stop := running(t, db, cfg, Job{Name: "j", Spec: "@every 100ms", Run: counting(&runs)})
	eventually(t, "two runs", func() bool { return runs.Load() >= 2 })
	if err := stop(); err != nil || seen.Load() == 0 {
		t.Errorf("%v, %d measurements", err, seen.Load())
	}
}
