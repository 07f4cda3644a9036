package scheduler

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// While releases with different timetables run side by side, the one that started last has its way; the other stands by
// and takes over when nobody is left who follows the row's.
func TestRollout(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var older, newer atomic.Int64
	cfg := quiet()
	cfg.Poll = 100 * time.Millisecond
	a := replica(t, db, cfg, Job{Name: "j", Spec: yearly, Run: counting(&older)})
	b := replica(t, db, cfg, Job{Name: "j", Spec: "0 0 2 1 *", Zone: "Asia/Tokyo", Run: counting(&newer)})
	run := func(wantOlder, wantNewer int64) {
		t.Helper()
		due(t, db, "j", 0)
		a.step(t)
		b.step(t)
		a.step(t)
		if older.Load() != wantOlder || newer.Load() != wantNewer {
			t.Fatalf("the older release ran %d times, the newer %d; want %d and %d", older.Load(), newer.Load(), wantOlder, wantNewer)
		}
	}
	a.step(t)
	due(t, db, "j", 0)
	a.step(t)
	b.step(t) // the newer release starts, and the row is its own
	if s := statusOf(t, a.Scheduler, "j"); s.Spec != "0 0 2 1 *" || s.Zone != "Asia/Tokyo" || s.NextAt.In(time.FixedZone("", 9*3600)).Day() != 2 {
		t.Errorf("%+v", s)
	}
	run(1, 1)
	run(1, 2)
	again := replica(t, db, cfg, Job{Name: "j", Spec: yearly, Run: counting(&older)}) // rolled back
	again.step(t)
	run(2, 2)
	// The older release is gone.
	eventually(t, "the newer release takes over", func() bool {
		b.step(t)
		return statusOf(t, b.Scheduler, "j").Spec == "0 0 2 1 *"
	})
	due(t, db, "j", 0)
	b.step(t)
	if older.Load() != 2 || newer.Load() != 3 {
		t.Errorf("%d and %d runs", older.Load(), newer.Load())
	}
}

// A replica of the row's timetable that only looks keeps others standing by.
func TestStandingByWhileTheOthersLive(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	a := replica(t, db, quiet(), Job{Name: "j", Spec: yearly, Run: nothing})
	a.step(t)
	_, stop := running(t, db, quiet(), Job{Name: "j", Spec: "@monthly", Run: nothing})
	eventually(t, "the newer timetable", func() bool { return statusOf(t, a.Scheduler, "j").Spec == "@monthly" })
	for start := time.Now(); time.Since(start) < 2*a.cfg.standby(); time.Sleep(20 * time.Millisecond) {
		a.step(t)
		if s := statusOf(t, a.Scheduler, "j"); s.Spec != "@monthly" {
			t.Fatalf("taken over %v after the last sign", time.Since(s.SeenAt))
		}
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
}

// Ticks run through a transaction pooler in every mode for it, and in another schema.
func TestThroughAPoolerInAnotherSchema(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if err := migrate.Up(t.Context(), db.Pool, migrate.Config{Schema: "other"}); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeSimpleProtocol} {
		parsed, err := pgxpool.ParseConfig(db.Bouncer(t))
		if err != nil {
			t.Fatal(err)
		}
		parsed.ConnConfig.DefaultQueryExecMode = mode
		pool, err := pgxpool.NewWithConfig(context.Background(), parsed)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		cfg := quiet()
		cfg.Schema = "other"
		var runs atomic.Int64
		name := mode.String()
		s, stop := running(t, &testenv.DB{Pool: pool}, cfg, Job{Name: name, Spec: "@every 100ms", Jitter: 20 * time.Millisecond, Run: func(ctx context.Context, _ Tick) error {
			if runs.Add(1) == 1 {
				sleep(ctx, 500*time.Millisecond) // is renewed
				panic("once")
			}
			return nil
		}})
		eventually(t, "three runs", func() bool { return runs.Load() >= 3 })
		if got := statusOf(t, s, name); got.Failures != 1 || got.SucceededAt.IsZero() {
			t.Errorf("%+v", got)
		}
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
}
