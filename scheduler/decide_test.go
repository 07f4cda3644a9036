package scheduler

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/db"
)

func nothing(context.Context, Tick) error { return nil }

func jobOf(t *testing.T, j Job) *job {
	t.Helper()
	if j.Name == "" {
		j.Name = "j"
	}
	if j.Run == nil {
		j.Run = nothing
	}
	checked, err := newJob(j)
	if err != nil {
		t.Fatal(err)
	}
	return checked
}

// What becomes of a row, by the database's time alone.
func TestDecide(t *testing.T) {
	t.Parallel()
	noon := time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)
	cfg := Config{}.withDefaults()
	at := func(d time.Duration) *time.Time { t := noon.Add(d); return &t }
	hourly := Job{Spec: "@hourly"}
	catchUp := Job{Spec: "@hourly", CatchUp: true}
	interval := Job{Spec: "@every 10s"}
	for name, c := range map[string]struct {
		job   Job
		row   db.ScheduleLookRow // times of which are set below if they are zero
		due   time.Duration      // from now
		first bool
		do    action
		next  time.Duration // from now
	}{
		"not due":                               {job: hourly, due: time.Hour, do: idle},
		"due now":                               {job: hourly, due: 0, do: claim, next: time.Hour},
		"a little late":                         {job: hourly, due: -time.Minute, do: claim, next: time.Hour},
		"too late":                              {job: hourly, due: -61 * time.Second, do: skip, next: time.Hour},
		"too late, catches up once":             {job: catchUp, due: -6 * time.Hour, do: claim, next: time.Hour},
		"an interval catches up":                {job: interval, due: -time.Hour, do: claim, next: 10 * time.Second},
		"an interval keeps its pace":            {job: interval, due: -4 * time.Second, do: claim, next: 6 * time.Second},
		"runs":                                  {job: hourly, row: db.ScheduleLookRow{LeaseUntil: at(time.Second)}, due: -time.Second, do: idle},
		"ran and died":                          {job: hourly, row: db.ScheduleLookRow{LeaseUntil: at(0)}, due: time.Minute, do: bury},
		"paused":                                {job: hourly, row: db.ScheduleLookRow{Paused: true}, due: -time.Second, do: idle},
		"the clock was put back by a week":      {job: hourly, due: 7 * 24 * time.Hour, do: rewind, next: time.Hour},
		"by a minute":                           {job: interval, due: time.Minute, do: idle},
		"monthly is far ahead":                  {job: Job{Spec: "@monthly"}, due: 29 * 24 * time.Hour, do: idle},
		"another timetable, just started":       {job: hourly, row: db.ScheduleLookRow{Spec: "@daily"}, first: true, due: 9 * time.Hour, do: adopt, next: time.Hour},
		"another timetable, its tick is due":    {job: hourly, row: db.ScheduleLookRow{Spec: "@daily"}, first: true, due: -time.Minute, do: adopt, next: -time.Minute},
		"another timetable, its followers live": {job: hourly, row: db.ScheduleLookRow{Spec: "@daily", SeenAt: noon.Add(-44 * time.Second)}, due: -time.Minute, do: idle},
		"another timetable, its followers are gone": {job: hourly, row: db.ScheduleLookRow{Spec: "@daily", SeenAt: noon.Add(-45 * time.Second)}, due: 9 * time.Hour, do: adopt, next: time.Hour},
		"another zone": {job: hourly, row: db.ScheduleLookRow{Zone: "Asia/Tokyo"}, first: true, due: 9 * time.Hour, do: adopt, next: time.Hour},
		"another timetable, a tick that ran a moment ahead of this clock": {
			job: hourly, row: db.ScheduleLookRow{Spec: "@daily", TickAt: at(time.Hour)}, first: true, due: 9 * time.Hour, do: adopt, next: 2 * time.Hour,
		},
	} {
		j := jobOf(t, c.job)
		row := c.row
		if row.Spec == "" {
			row.Spec = j.Spec
		}
		if row.Zone == "" {
			row.Zone = j.Zone
		}
		if row.SeenAt.IsZero() {
			row.SeenAt = noon
		}
		row.Now, row.NextTickAt, row.DueAt = noon, noon.Add(c.due), noon.Add(c.due)
		got := j.decide(&row, c.first, &cfg)
		if got.do != c.do {
			t.Errorf("%s: action %d, want %d", name, got.do, c.do)
		}
		if want := noon.Add(c.next); c.do != idle && c.do != bury && !got.plan.tick.Equal(want) {
			t.Errorf("%s: next tick %v, want %v", name, got.plan.tick, want)
		}
		if c.do == idle && got.wake <= 0 {
			t.Errorf("%s: waits %v", name, got.wake)
		}
	}
}

// Whatever the row, a claim moves it on: a tick that was claimed cannot come again.
func TestClaimMovesOn(t *testing.T) {
	t.Parallel()
	cfg := Config{}.withDefaults()
	rapid.Check(t, func(rt *rapid.T) {
		cfg := cfg
		cfg.random = func() float64 { return rapid.Float64Range(0, 0.999).Draw(rt, "random") }
		j := jobOf(t, Job{
			Spec:    rapid.SampledFrom([]string{"* * * * *", "30 2 * * *", "@every 7s", "@every 100ms", "@monthly", "0 0 29 2 *"}).Draw(rt, "spec"),
			Zone:    rapid.SampledFrom([]string{"UTC", "Europe/Berlin", "Australia/Lord_Howe"}).Draw(rt, "zone"),
			CatchUp: rapid.Bool().Draw(rt, "catch up"), Jitter: time.Duration(rapid.IntRange(0, 1e10).Draw(rt, "jitter")),
		})
		now := time.UnixMicro(rapid.Int64Range(1.7e15, 1.9e15).Draw(rt, "now")).UTC()
		tick := now.Add(-time.Duration(rapid.Int64Range(0, 1e16).Draw(rt, "late")) / 1000 * 1000)
		row := db.ScheduleLookRow{Spec: j.Spec, Zone: j.Zone, Now: now, NextTickAt: tick, DueAt: tick}
		d := j.decide(&row, false, &cfg)
		if d.do != claim && d.do != skip {
			rt.Fatalf("action %d", d.do)
		}
		if !d.plan.tick.After(now) || d.plan.due.Before(d.plan.tick) {
			rt.Fatalf("now %v, then %v due %v", now, d.plan.tick, d.plan.due)
		}
		after := j.timetable.next(d.plan.tick)
		if delay := d.plan.due.Sub(d.plan.tick); delay > j.Jitter || delay > after.Sub(d.plan.tick)/2 {
			rt.Fatalf("jitter %v of %v before %v", delay, j.Jitter, after)
		}
	})
}

// Ticks are spread over the jitter, or over half the time to the next tick, and the delay stands in the row for all to see.
func TestJitter(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 6, 1, 11, 59, 0, 0, time.UTC)
	for _, c := range []struct {
		spec   string
		random float64
		want   time.Duration
	}{{"@hourly", 0, 0}, {"@hourly", 0.5, 5 * time.Minute}, {"* * * * *", 0.5, 15 * time.Second}, {"@every 10s", 0.9, 4500 * time.Millisecond}} {
		cfg := Config{}.withDefaults()
		cfg.random = func() float64 { return c.random }
		j := jobOf(t, Job{Spec: c.spec, Jitter: 10 * time.Minute})
		p := j.plan(now, &cfg)
		if got := p.due.Sub(p.tick); got != c.want {
			t.Errorf("%s, %v: %v after its tick", c.spec, c.random, got)
		}
		row := db.ScheduleLookRow{Spec: j.Spec, Zone: j.Zone, Now: p.due.Add(-time.Microsecond), NextTickAt: p.tick, DueAt: p.due}
		if d := j.decide(&row, false, &cfg); d.do != idle || d.wake != time.Microsecond {
			t.Errorf("%s: %+v before it is due", c.spec, d)
		}
		row.Now = p.due
		if d := j.decide(&row, false, &cfg); d.do != claim || d.plan.tick.Before(p.tick) {
			t.Errorf("%s: %+v when it is due", c.spec, d)
		}
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	_, err := New(nil, []Job{
		{Name: "", Spec: "x", Zone: "y", Timeout: -1, Jitter: -1},
		{Name: "twice", Spec: "@daily", Run: nothing},
		{Name: "twice", Spec: "@daily", Run: nothing},
		{Name: strings.Repeat("n", 64), Spec: strings.Repeat("s", 256), Run: nothing},
	}, Config{Schema: "No", Owner: "\x00", Lease: time.Millisecond, Poll: -1, Late: -1, Drain: -1, Grace: -1})
	for _, want := range []string{
		"Name is empty", "Zone is not the name", "Timeout is negative", "Jitter is negative", "Run is nil", `"twice" twice`, "Name is too long", "Spec is too long",
		"schema name", "Owner contains a NUL", "Lease is below", "Poll is not", "Late is not", "Drain is not", "Grace is not", "pool is nil",
	} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("does not say %q: %v", want, err)
		}
	}
	if input := new(commitbox.InputError); !errors.As(err, &input) {
		t.Errorf("%T", err)
	}
	if _, err := New(nil, nil, Config{Logger: slog.Default()}); err == nil || !strings.Contains(err.Error(), "jobs is empty") {
		t.Error(err)
	}
}

func TestOutcomeOf(t *testing.T) {
	t.Parallel()
	for want, c := range map[string]struct {
		got   result
		back  bool
		cause error
	}{
		hung:      {result{}, false, context.DeadlineExceeded},
		panicked:  {result{err: errors.New("x"), panicked: true}, true, errStopping},
		succeeded: {result{}, true, errStopping},
		cancelled: {result{err: errors.New("x")}, true, errStopping},
		died:      {result{err: errors.New("x")}, true, errLeaseLost},
		timedOut:  {result{err: errors.New("x")}, true, context.DeadlineExceeded},
		failed:    {result{err: context.DeadlineExceeded}, true, nil},
	} {
		if got := outcomeOf(c.got, c.back, c.cause); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}
