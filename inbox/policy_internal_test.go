package inbox

import (
	"context"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// The stages of a change, from how long ago it was written and from who follows it.
func TestF10_Stage(t *testing.T) {
	t.Parallel()
	const lease, horizon = 10 * time.Second, time.Hour
	for _, c := range []struct {
		since    time.Duration
		followed bool
		want     Stage
	}{
		{-1, true, StageSettled},
		{-1, false, StageSettled},
		{0, true, StageBoth},
		{aliveFor + lease - 1, true, StageBoth},
		{aliveFor + lease, true, StageHistory},
		{aliveFor + lease, false, StageBoth},
		{horizon, true, StageHistory}, // of what the former mode finished last
		{aliveFor + lease + horizon - 1, true, StageHistory},
		{aliveFor + lease + horizon, true, StageSettled},
		{100 * horizon, false, StageBoth},
	} {
		if got := stage(c.since, c.followed, lease, horizon); got != c.want {
			t.Errorf("%s after the change, followed %t: %s, want %s", c.since, c.followed, got, c.want)
		}
	}
}

// Each change of the mode, with what is asked in each stage.
func TestF10_WhatIsAskedInEachStageOfEachChange(t *testing.T) {
	t.Parallel()
	row, front := guards{row: true}, guards{row: true, front: true}
	both, frontBoth := guards{row: true, token: true}, guards{row: true, token: true, front: true}
	tokens, frontTokens := guards{row: true, readToken: true}, guards{row: true, readToken: true, front: true}
	token, tokenRows := guards{token: true}, guards{token: true, readRow: true}
	const left, not = 0, -1 * time.Second
	for _, c := range []struct {
		from, to             Mode
		tableLeft, guardLeft time.Duration // as the table notes them
		want                 [3]guards     // settled, both, history
	}{
		{"", ModePostgres, not, not, [3]guards{row, row, row}},
		{ModePostgres, ModeDouble, not, not, [3]guards{front, front, front}},
		{ModeDouble, ModePostgres, not, not, [3]guards{row, row, row}},
		{ModePostgres, ModeCache, left, not, [3]guards{token, both, tokenRows}},
		{ModeDouble, ModeCache, left, not, [3]guards{token, both, tokenRows}},
		{ModeCache, ModePostgres, not, left, [3]guards{row, both, tokens}},
		{ModeCache, ModeDouble, not, left, [3]guards{front, frontBoth, frontTokens}},
		{ModeOff, ModePostgres, not, not, [3]guards{row, row, row}},
		{ModeOff, ModeCache, not, not, [3]guards{token, token, token}},
		{ModeCache, ModeOff, not, left, [3]guards{}},
		{ModePostgres, ModeOff, left, not, [3]guards{}},
		{ModeOff, ModePostgres, not, left, [3]guards{row, both, tokens}}, // and it was cache before that
	} {
		s := Standing{Policy: Policy{Mode: c.to, RetryHorizon: time.Hour}, tableLeft: c.tableLeft, guardLeft: c.guardLeft}
		for want, passed := range map[Stage]time.Duration{StageBoth: 0, StageHistory: 10 * time.Minute, StageSettled: 2 * time.Hour} {
			got := guardsOf(s.Mode, s.stage(passed, true, time.Minute))
			if got != c.want[want] {
				t.Errorf("%s to %s after %s:\n%+v, want\n%+v", c.from, c.to, passed, got, c.want[want])
			}
		}
	}
}

func TestF8_WhatTellsThatADatabaseWasRestored(t *testing.T) {
	t.Parallel()
	type seen struct {
		Identity
		written uint64
		trusted bool
	}
	first := Identity{System: 1, Timeline: 1, Generation: 10}
	timeline := Identity{System: 1, Timeline: 2, Generation: 10}
	rotated := Identity{System: 1, Timeline: 1, Generation: 11}
	for name, steps := range map[string][]seen{
		"goes on":                     {{first, 100, true}, {first, 100, true}, {first, 200, true}},
		"an older log":                {{first, 200, true}, {first, 199, false}, {first, 300, false}, {rotated, 310, true}, {rotated, 320, true}},
		"another time line":           {{first, 200, true}, {timeline, 100, true}, {timeline, 99, false}},
		"an older generation":         {{rotated, 100, true}, {first, 200, false}, {rotated, 300, false}, {Identity{1, 1, 12}, 300, true}},
		"a rotation behind a restore": {{first, 200, true}, {rotated, 100, true}, {rotated, 150, true}},
		"another server":              {{first, 200, true}, {Identity{2, 1, 5}, 10, true}},
	} {
		var w witness
		for i, s := range steps {
			if got := w.learn(s.Identity, s.written); got != s.trusted {
				t.Errorf("%s, step %d: trusted %t", name, i, got)
			}
		}
	}
}

func key(message string) flightKey { return flightKey{ID: ID{"c", message}} }

// While the stores are asked for one copy, the others wait for its answer; none of them asks.
func TestA10_OneCopyAsksForAll(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f, asked := newFlights(), atomic.Int64{}
		var group sync.WaitGroup
		for range 10_000 {
			group.Go(func() {
				v := f.do(t.Context(), key("m"), time.Now(), func(func()) verdict {
					asked.Add(1)
					time.Sleep(time.Second)
					return verdict{outcome: Replayed, result: []byte("r")}
				})
				if v.outcome != Replayed || string(v.result) != "r" {
					t.Errorf("%s %q", v.outcome, v.result)
				}
			})
		}
		group.Wait()
		if asked.Load() != 1 || len(f.open) != 0 {
			t.Errorf("%d asked, %d are open", asked.Load(), len(f.open))
		}
	})
}

// A handler that has begun is in progress for the others at once, or they wait so long as they may and one of them goes on.
func TestA10_AHandlerThatRunsIsInProgressForTheOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newFlights()
		outcomes := make(chan Outcome, 4)
		run := func(bound time.Duration, v verdict) {
			outcomes <- f.do(t.Context(), key("m"), time.Now().Add(bound), func(begun func()) verdict {
				begun()
				time.Sleep(time.Second)
				return v
			}).outcome
		}
		go run(0, verdict{outcome: Failed})
		synctest.Wait()
		start := time.Now()
		run(0, verdict{})
		run(time.Second/2, verdict{})
		if waited := time.Since(start); waited != time.Second/2 {
			t.Errorf("waited for %s", waited)
		}
		run(time.Minute, verdict{outcome: Executed}) // takes over
		got := []Outcome{<-outcomes, <-outcomes, <-outcomes, <-outcomes}
		if diff := cmp.Diff([]Outcome{InProgress, InProgress, Failed, Executed}, got); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
}

// heldGuard is held by another process.
type heldGuard struct{ Guard }

func (heldGuard) Begin(context.Context, ID, string, time.Duration) (GuardState, CacheEntry, time.Duration, error) {
	return GuardHeld, CacheEntry{}, 0, nil
}

// The wait for a copy in this process and the one for a copy elsewhere are bounded together.
func TestA10_WaitsInTurnDoNotAddUp(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		box := Box{flights: newFlights(), settings: settings{
			Config: Config{Wait: 10 * time.Second, Guard: heldGuard{}, MaxDeliveries: 1},
			policy: &policy{Standing: Standing{Policy: Policy{Mode: ModeCache}}, guards: guards{token: true}, snapshot: new(snapshot)},
		}}
		m := Message{ID: ID{"c", "m"}}
		start := time.Now()
		go box.flights.do(t.Context(), flightOf(&m), start, func(begun func()) verdict {
			begun()
			time.Sleep(7 * time.Second)
			return verdict{outcome: Failed}
		})
		synctest.Wait()
		v := box.byMode(t.Context(), &m, nil)
		if waited := time.Since(start); v.outcome != InProgress || waited != box.Wait {
			t.Errorf("%s after %s", v.outcome, waited)
		}
	})
}

// When the copy that asks goes away, one of those that wait asks next, and not all of them.
func TestB47_WhenTheCopyThatAsksGoesAwayOneOtherAsks(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f, asking, most := newFlights(), atomic.Int64{}, atomic.Int64{}
		ask := func(ctx context.Context) verdict {
			return f.do(ctx, key("m"), time.Now(), func(func()) verdict {
				most.Store(max(most.Load(), asking.Add(1)))
				defer asking.Add(-1)
				if !sleep(ctx, time.Second) {
					return unavailable(ctx.Err())
				}
				return verdict{outcome: Replayed}
			})
		}
		leader, goAway := context.WithCancel(t.Context())
		go ask(leader)
		synctest.Wait()
		var group sync.WaitGroup
		for range 100 {
			group.Go(func() {
				if v := ask(t.Context()); v.outcome != Replayed {
					t.Errorf("%s %v", v.outcome, v.err)
				}
			})
		}
		synctest.Wait()
		goAway()
		group.Wait()
		if most.Load() != 1 {
			t.Errorf("%d asked at one time", most.Load())
		}
	})
}

// A policy that this version cannot understand is refused as a whole.
func TestB6_APolicyThatIsNotUnderstoodIsNamed(t *testing.T) {
	t.Parallel()
	good := Policy{Mode: ModeCache, StoreDown: StoreDownOpen, Retention: time.Hour, DeadRetention: time.Hour, RetryHorizon: time.Minute, AbandonAfter: time.Hour}
	for name, change := range map[string]func(*Policy){
		"":                             func(*Policy) {},
		"mode":                         func(p *Policy) { p.Mode = "triple" },
		"store_down":                   func(p *Policy) { p.StoreDown = "" },
		"retention":                    func(p *Policy) { p.DeadRetention = time.Second },
		"retry_horizon, abandon_after": func(p *Policy) { p.AbandonAfter = -1 },
		"lease":                        func(p *Policy) { p.Lease = time.Millisecond },
		"max_attempts":                 func(p *Policy) { p.MaxAttempts = -1 },
		"backoff":                      func(p *Policy) { p.BackoffMax = -1 },
	} {
		s := Standing{Consumer: "c", Policy: good}
		change(&s.Policy)
		err := s.check()
		if (err == nil) != (name == "") || err != nil && !strings.Contains(err.Error(), "policy of c: "+name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Each mode shows its level, and has a section of the documentation that says what it does not promise.
func TestA8_EachModeShowsItsLevel(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	for mode, want := range map[Mode]string{ModePostgres: "exactly-once effect", ModeDouble: "strong", ModeCache: "weak", ModeOff: "none"} {
		if got := mode.Level(); got != want {
			t.Errorf("%s: %s", mode, got)
		}
		_, section, _ := strings.Cut(string(text), "\n// # Mode "+string(mode)+": "+mode.Level()+"\n")
		section, _, _ = strings.Cut(section, "\n// # ")
		section = strings.ReplaceAll(section, "\n// ", " ")
		if !strings.Contains(section, "Not promised") && !strings.Contains(section, "nothing is promised") {
			t.Errorf("mode %s has no section that says what it does not promise: %q", mode, section)
		}
	}
}
