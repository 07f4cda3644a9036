package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// In mode cache there is a token and no row: a copy is refused while the first one runs, and answered afterwards with its
// value.
func TestA1_ACopyIsInProgressAndThenReplayed(t *testing.T) {
	g := newGuarded(t, inbox.ModeCache)
	other := g.box2(inbox.Config{})
	res, err := inbox.Process(t.Context(), g.box, inbox.Message{ID: id("m")}, func(ctx context.Context, tx pgx.Tx) (string, error) {
		g.want("meanwhile, here", g.process(g.box, "m"), "in_progress by table")
		g.want("meanwhile, elsewhere", g.process(other, "m"), "in_progress by cache")
		return "value of m", write(ctx, tx, id("m"), "")
	})
	if err != nil || res.DecidedBy != inbox.ByCache {
		t.Errorf("%+v %v", res, err)
	}
	g.want("then", g.process(other, "m"), "replayed by cache")
	g.wantRow(id("m"), "", 0)
	g.wantEffects(id("m"), 1)
	mismatch := inbox.Message{ID: id("f"), Fingerprint: inbox.FingerprintOf([]byte("a"))}
	g.want("with a fingerprint", g.deliver(g.box, mismatch), "executed by cache")
	mismatch.Fingerprint = inbox.FingerprintOf([]byte("b"))
	g.want("with another one", g.deliver(g.box, mismatch), "mismatch by cache")
}

// box2 is a box of another process: it has policies of its own.
func (g *guardedWorld) box2(cfg inbox.Config) *inbox.Box {
	g.t.Helper()
	cfg.Policies, cfg.Cache, cfg.Guard = g.world.policies(nil), g.front, g.front
	return g.world.box(cfg)
}

// Waiters take over when the winner fails, one after the other.
func TestA1_AWaiterTakesOverWhenTheWinnerFails(t *testing.T) {
	g := newGuarded(t, inbox.ModeCache)
	boxes := []*inbox.Box{g.box2(inbox.Config{Wait: patience}), g.box2(inbox.Config{Wait: patience})}
	var running, most, tries atomic.Int64
	var group sync.WaitGroup
	for n := range 8 {
		group.Go(func() {
			_, err := inbox.Process(context.Background(), boxes[n%2], inbox.Message{ID: id("m")}, func(ctx context.Context, tx pgx.Tx) (string, error) {
				most.Store(max(most.Load(), running.Add(1)))
				defer running.Add(-1)
				if tries.Add(1) < 4 {
					return "", errors.New("not yet")
				}
				return "value", write(ctx, tx, id("m"), "")
			})
			if err != nil && !errors.Is(err, inbox.ErrFailed) {
				t.Error(err)
			}
		})
	}
	group.Wait()
	if tries.Load() != 4 || most.Load() != 1 {
		t.Errorf("%d runs, %d at one time; want 4 and 1", tries.Load(), most.Load())
	}
	g.wantEffects(id("m"), 1)
}

// lateGuard says that another token holds the message until a time, and grants it then.
type lateGuard struct {
	inbox.Guard
	until time.Time
}

func (g lateGuard) Begin(ctx context.Context, id inbox.ID, token string, lease time.Duration) (inbox.GuardState, inbox.CacheEntry, time.Duration, error) {
	if left := time.Until(g.until); left > 0 {
		return inbox.GuardHeld, inbox.CacheEntry{}, left, nil
	}
	return g.Guard.Begin(ctx, id, token, lease)
}

// The wait for a token and the one for the row behind it are bounded together.
func TestA1_WaitsForTokenAndRowDoNotAddUp(t *testing.T) {
	const wait = 4 * time.Second
	g := newGuarded(t, inbox.ModePostgres)
	g.mode("c", inbox.ModeCache, g.policies) // both are asked from now on
	tx := g.begin()
	if _, err := inbox.Handle(t.Context(), tx, id("m"), func(context.Context) (inbox.Void, error) { return inbox.Void{}, nil }); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	box := g.world.box(inbox.Config{Policies: g.policies, Guard: lateGuard{g.front, start.Add(wait - 200*time.Millisecond)}, Wait: wait})
	g.want("a copy", g.process(box, "m"), "in_progress by table")
	if waited := time.Since(start); waited < wait-200*time.Millisecond || waited > 3*wait/2 {
		t.Errorf("waited for %s of %s", waited, wait)
	}
}

// The token lives as long as the handler, however long that is; when it is lost, nothing is committed.
func TestA1_TheTokenIsRenewedAndItsLossIsNoticed(t *testing.T) {
	g := newGuarded(t, inbox.ModeCache)
	g.exec(`select commitbox.inbox_policy_set('c', '{"lease": "1 second"}')`)
	g.load(g.policies)
	other := g.box2(inbox.Config{})
	_, err := inbox.Process(t.Context(), g.box, inbox.Message{ID: id("long")}, func(ctx context.Context, tx pgx.Tx) (string, error) {
		time.Sleep(2500 * time.Millisecond)
		g.want("after its first lease", g.process(other, "long"), "in_progress by cache")
		return "value of long", ctx.Err()
	})
	if err != nil {
		t.Error(err)
	}
	_, err = inbox.Process(t.Context(), g.box, inbox.Message{ID: id("lost")}, func(ctx context.Context, tx pgx.Tx) (string, error) {
		g.front.clear(t)
		select {
		case <-ctx.Done():
		case <-time.After(patience):
			t.Error("its context goes on")
		}
		return "", write(context.WithoutCancel(ctx), tx, id("lost"), "")
	})
	if !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("a lost token: %v", err)
	}
	g.wantEffects(id("lost"), 0)
}

// An error of Redis after the handler has succeeded is no failure of the handler.
func TestA1_AnErrorOfRedisAfterTheHandlerIsNoFailure(t *testing.T) {
	w := newWorld(t)
	proxy := testenv.NewProxy(t, testenv.Redis(t))
	g := guard(w, newFront(t, proxy.URL(t, testenv.Redis(t))), inbox.ModeCache)
	res, err := inbox.Process(t.Context(), g.box, inbox.Message{ID: id("m")}, func(ctx context.Context, tx pgx.Tx) (string, error) {
		proxy.Refuse(true)
		proxy.Cut()
		return "value", write(ctx, tx, id("m"), "")
	})
	if err != nil || res.Value != "value" {
		t.Errorf("%+v %v", res, err)
	}
	g.wantEffects(id("m"), 1)
}

// While Redis is away, mode cache refuses, or runs unguarded and counts it, as the policy says.
func TestA10_TheStoreDownPolicyDecides(t *testing.T) {
	w := newWorld(t)
	proxy := testenv.NewProxy(t, testenv.Redis(t))
	g := guard(w, newFront(t, proxy.URL(t, testenv.Redis(t))), inbox.ModeCache)
	seen := &counts{seen: map[string]float64{}}
	box := g.world.box(inbox.Config{Policies: g.policies, Cache: g.front, Guard: g.front, Observer: seen})
	proxy.Refuse(true)
	proxy.Cut()
	g.want("closed", g.process(box, "m"), "unavailable by table")
	g.wantEffects(id("m"), 0)
	g.exec(`select commitbox.inbox_policy_set('c', '{"store_down": "open"}')`)
	g.load(g.policies)
	g.want("open", g.process(box, "m"), "executed by off")
	g.want("open, again", g.process(box, "m"), "executed by off")
	if n := seen.seen["commitbox_inbox_unguarded[c store_down]"]; n != 2 {
		t.Errorf("counted %v", seen.seen)
	}
	none := g.world.box(inbox.Config{Policies: g.policies})
	g.exec(`select commitbox.inbox_policy_set('c', '{"store_down": "closed"}')`)
	g.load(g.policies)
	g.want("a box without Redis", g.process(none, "n"), "unavailable by table")
}

// Handle and leases have a row in mode cache too, and know what Process finished in Redis.
func TestB6_WorkThatNeedsARowHasOneInModeCache(t *testing.T) {
	g := newGuarded(t, inbox.ModeCache)
	tx := g.begin()
	handle := func(message string) string {
		res, err := inbox.Handle(t.Context(), tx, id(message), func(ctx context.Context) (string, error) {
			return "value of " + message, write(ctx, tx, id(message), "")
		}, inbox.Using(g.box))
		if err != nil || res.Value != "value of "+message {
			t.Errorf("%+v %v", res, err)
		}
		return res.Outcome.String() + " by " + res.DecidedBy.String()
	}
	g.process(g.box, "p")
	g.want("what Process finished", handle("p"), "replayed by cache")
	g.want("Handle", handle("h"), "executed by table")
	g.commit(tx)
	g.wantRow(id("h"), "completed", 1)
	if _, err := g.box.Acquire(t.Context(), inbox.Message{ID: id("p")}); inbox.Disposition(err).Verdict != inbox.Ack {
		t.Errorf("a lease on what Process finished: %v", err)
	}
	lease, err := g.box.Acquire(t.Context(), inbox.Message{ID: id("l")})
	if err != nil {
		t.Fatal(err)
	}
	g.wantRow(id("l"), "pending", 1)
	if _, err := inbox.Complete(t.Context(), lease, "x"); err != nil {
		t.Error(err)
	}
}

// Each change of the mode, stage by stage: what one mode has finished never runs again in the other, and while replicas
// may disagree they keep each other out.
func TestF10_NoHistoryIsForgottenByAChangeOfMode(t *testing.T) {
	for _, c := range []struct{ from, to inbox.Mode }{
		{inbox.ModePostgres, inbox.ModeCache},
		{inbox.ModeDouble, inbox.ModeCache},
		{inbox.ModeCache, inbox.ModePostgres},
		{inbox.ModeCache, inbox.ModeDouble},
	} {
		t.Run(fmt.Sprintf("%s to %s", c.from, c.to), func(t *testing.T) {
			g := newGuarded(t, c.from)
			slow := g.world.policies(nil) // does not hear of the change yet
			behind := g.world.box(inbox.Config{Policies: slow, Cache: g.front, Guard: g.front})
			old := map[inbox.Mode]string{inbox.ModePostgres: "table", inbox.ModeDouble: "table", inbox.ModeCache: "cache"}[c.from]
			fresh := map[inbox.Mode]string{inbox.ModePostgres: "table", inbox.ModeDouble: "table", inbox.ModeCache: "cache"}[c.to]
			stage := func(want inbox.Stage) {
				t.Helper()
				if at, err := g.policies.Get("c"); err != nil || at.Stage != want || at.Mode != c.to {
					t.Fatalf("now %+v, want stage %s", at, want)
				}
			}
			g.want("before", g.process(g.box, "before"), "executed by "+old)
			g.want("before", g.process(g.box, "asked late"), "executed by "+old)
			g.mode("c", c.to, g.policies)
			stage(inbox.StageBoth)
			g.exec(`update commitbox.inbox_policy set table_left = table_left - interval '10 minutes', guard_left = guard_left - interval '10 minutes' where consumer = 'c'`)
			g.load(g.policies)
			stage(inbox.StageBoth) // because one replica has not followed
			replayed(g, "a new one asks for an old message", g.box, "before")
			g.want("an old one", g.process(behind, "by the old"), "executed by "+old)
			replayed(g, "and the new one hears", g.box, "by the old")
			g.want("a new one", g.process(g.box, "by the new"), "executed by table")
			replayed(g, "and the old one hears", behind, "by the new")
			excluded(g, behind, g.box, "old first")
			excluded(g, g.box, behind, "new first")
			g.load(slow)
			g.age("c", "1 minute", slow, g.policies)
			stage(inbox.StageHistory)
			for _, message := range []string{"before", "by the old", "by the new", "asked late"} {
				replayed(g, "in the history", g.box, message)
			}
			g.want("only the new store is written", g.process(g.box, "later"), "executed by "+fresh)
			g.age("c", "1 day", slow, g.policies)
			stage(inbox.StageSettled)
			replayed(g, "settled", g.box, "later")
			for _, message := range []string{"before", "by the old", "by the new", "asked late", "later"} {
				g.wantEffects(id(message), 1)
			}
		})
	}
}

func replayed(g *guardedWorld, what string, box *inbox.Box, message string) {
	g.t.Helper()
	if got := g.process(box, message); got != "replayed by table" && got != "replayed by cache" {
		g.t.Errorf("%s: %s: %s", what, message, got)
	}
}

// excluded demands that a message that one box is handling is in progress for the other.
func excluded(g *guardedWorld, first, second *inbox.Box, message string) {
	g.t.Helper()
	_, err := inbox.Process(g.t.Context(), first, inbox.Message{ID: id(message)}, func(ctx context.Context, tx pgx.Tx) (string, error) {
		if got := g.process(second, message); got != "in_progress by table" && got != "in_progress by cache" {
			g.t.Errorf("%s, while it runs: %s", message, got)
		}
		return "value of " + message, write(ctx, tx, id(message), "")
	})
	if err != nil {
		g.t.Errorf("%s: %v", message, err)
	}
	replayed(g, "afterwards", second, message)
	g.wantEffects(id(message), 1)
}

// An operator ends a change: what only the former store knew may run again, and that is counted.
func TestF10_ForgetEndsAChangeAtOnce(t *testing.T) {
	g := newGuarded(t, inbox.ModeCache)
	g.process(g.box, "m")
	g.mode("c", inbox.ModePostgres, g.policies)
	replayed(g, "remembered", g.box, "m")
	if done, err := g.policies.Forget(t.Context(), "c", "Redis is gone"); err != nil || !done {
		t.Errorf("%t %v", done, err)
	}
	g.load(g.policies)
	g.want("forgotten", g.process(g.box, "m"), "executed by table")
	if n := one[int](g.world, `select count(*)::int from commitbox.audit where action = 'inbox_policy_forget' and reason = 'Redis is gone'`); n != 1 {
		t.Errorf("%d in the audit", n)
	}
}

// The store that a mode has left cannot be asked: the policy decides, and says no unless it was told otherwise.
func TestF10_AFormerStoreThatDoesNotAnswer(t *testing.T) {
	w := newWorld(t)
	proxy := testenv.NewProxy(t, testenv.Redis(t))
	g := guard(w, newFront(t, proxy.URL(t, testenv.Redis(t))), inbox.ModeCache)
	g.mode("c", inbox.ModePostgres, g.policies)
	proxy.Refuse(true)
	proxy.Cut()
	for _, stage := range []inbox.Stage{inbox.StageBoth, inbox.StageHistory} {
		if at, _ := g.policies.Get("c"); at.Stage != stage {
			t.Fatalf("stage %s, want %s", at.Stage, stage)
		}
		g.want("closed", g.process(g.box, "m"), "unavailable by table")
		g.exec(`select commitbox.inbox_policy_set('c', '{"store_down": "open"}')`)
		g.load(g.policies)
		g.want("open", g.process(g.box, stage.String()), "executed by table")
		g.exec(`select commitbox.inbox_policy_set('c', '{"store_down": "closed"}')`)
		g.age("c", "10 minutes", g.policies)
	}
}

// The mode goes back and forth all the time, on several replicas that follow by themselves, with each message delivered by
// all of them: every message has one effect, but for those that ran in mode off, each of which was counted.
func TestF10_B6_SwitchingUnderLoadKeepsOneEffect(t *testing.T) {
	for name, modes := range map[string][]inbox.Mode{
		"guarded":  {inbox.ModeCache, inbox.ModePostgres, inbox.ModeDouble, inbox.ModeCache, inbox.ModeDouble},
		"with off": {inbox.ModeOff, inbox.ModeCache, inbox.ModeOff, inbox.ModePostgres, inbox.ModeOff, inbox.ModeDouble, inbox.ModeCache, inbox.ModePostgres},
	} {
		t.Run(name, func(t *testing.T) { switchUnderLoad(t, modes) })
	}
}

func switchUnderLoad(t *testing.T, modes []inbox.Mode) {
	g := newGuarded(t, inbox.ModePostgres)
	length := 8 * time.Second
	if os.Getenv("COMMITBOX_SOAK") != "" {
		length = 5 * time.Minute
	}
	run, stop := context.WithCancel(t.Context())
	var following, group sync.WaitGroup
	var boxes []*inbox.Box
	seen := &counts{seen: map[string]float64{}}
	for range 3 {
		p := g.world.policies(nil)
		boxes = append(boxes, g.world.box(inbox.Config{
			Policies: p, Cache: g.front, Guard: g.front, BackoffBase: time.Millisecond, BackoffMax: time.Millisecond, Observer: seen,
		}))
		following.Go(func() { _ = p.Run(run) })
	}
	until := time.Now().Add(length)
	switches := 0
	group.Go(func() {
		for ; time.Now().Before(until); switches++ {
			g.exec(`select commitbox.inbox_policy_set('c', jsonb_build_object('mode', $1::text))`, string(modes[switches%len(modes)]))
			time.Sleep(time.Second)
		}
	})
	var messages, off, wrong atomic.Int64
	for range 4 {
		group.Go(func() {
			for time.Now().Before(until) {
				message := fmt.Sprint(messages.Add(1))
				var copies sync.WaitGroup
				var bare atomic.Int64
				for n := range 2 * len(boxes) {
					copies.Go(func() {
						if settle(g, boxes[n%len(boxes)], message, n) {
							bare.Add(1)
						}
					})
				}
				copies.Wait()
				off.Add(bare.Load())
				effects := one[int64](g.world, `select count(*) from effect where id = $1`, id(message).String())
				if guarded := effects - bare.Load(); effects < 1 || guarded < 0 || guarded > 1 {
					wrong.Add(1)
					t.Errorf("%s has %d effects, %d of them in mode off", message, effects, bare.Load())
				}
			}
		})
	}
	group.Wait()
	stop()
	following.Wait()
	seen.mu.Lock()
	defer seen.mu.Unlock()
	if n := seen.seen["commitbox_inbox_unguarded[c off]"]; n < float64(off.Load()) || slices.Contains(modes, inbox.ModeOff) != (n > 0) {
		t.Errorf("%v unguarded runs are counted, there were %d", n, off.Load())
	}
	t.Logf("%d switches, %d messages with %d copies each, %d runs in mode off, %d messages with a wrong number of effects",
		switches, messages.Load(), 2*len(boxes), off.Load(), wrong.Load())
}

// settle delivers a message until it is acked, and says whether its handler ran in mode off then.
func settle(g *guardedWorld, box *inbox.Box, message string, n int) (bare bool) {
	for tries := 0; ; tries++ {
		res, err := inbox.Process(context.Background(), box, inbox.Message{ID: id(message)}, func(ctx context.Context, tx pgx.Tx) (string, error) {
			if tries == 0 && n == 1 {
				return "", errors.Join(write(ctx, tx, id(message), "lost"), errors.New("the first try of one copy fails"))
			}
			return "value", write(ctx, tx, id(message), "")
		})
		if inbox.Disposition(err).Verdict == inbox.Ack {
			return res.Outcome == inbox.Executed && res.DecidedBy == inbox.ByOff
		}
		if tries > 3000 {
			g.t.Errorf("%s is never done: %v", message, err)
			return false
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// A process that died between its commit and telling Redis leaves the row. Whoever finds it tells Redis, for replicas that
// ask nothing else yet.
func TestF10_WhoFindsTheRowTellsRedis(t *testing.T) {
	g := newGuarded(t, inbox.ModeCache)
	behind := g.box2(inbox.Config{})
	g.mode("c", inbox.ModePostgres, g.policies)
	g.want("by the row and a token", g.process(g.box, "m"), "executed by table")
	g.front.clear(t)
	g.want("the row is found", g.process(g.box, "m"), "replayed by table")
	g.want("by one that asks Redis alone", g.process(behind, "m"), "replayed by cache")
	g.wantEffects(id("m"), 1)
}
