package inbox_test

import (
	"context"
	"crypto/rand"
	"errors"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/migrate"
)

func (w *world) policies(seen *counts) *inbox.Policies {
	w.t.Helper()
	cfg := inbox.PoliciesConfig{Logger: quiet}
	if seen != nil {
		cfg.Observer = seen
	}
	p, err := inbox.NewPolicies(w.Pool, cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	w.load(p)
	return p
}

func (w *world) load(p *inbox.Policies) {
	w.t.Helper()
	if err := p.Load(context.Background()); err != nil {
		w.t.Fatal(err)
	}
}

// mode sets the mode of a consumer and lets these follow it.
func (w *world) mode(consumer string, mode inbox.Mode, followers ...*inbox.Policies) {
	w.t.Helper()
	w.exec(`select commitbox.inbox_policy_set($1, jsonb_build_object('mode', $2::text))`, consumer, string(mode))
	for range 2 { // the second time they know that all have followed
		for _, p := range followers {
			w.load(p)
		}
	}
}

// age moves a consumer's change of mode into the past.
func (w *world) age(consumer, by string, followers ...*inbox.Policies) {
	w.t.Helper()
	w.exec(`update commitbox.inbox_policy set table_left = table_left - $2::interval, guard_left = guard_left - $2::interval where consumer = $1`, consumer, by)
	for range 2 {
		for _, p := range followers {
			w.load(p)
		}
	}
}

// follower is a replica with a pool of its own.
type follower struct {
	*inbox.Policies
	box *inbox.Box
}

func (w *world) follower(name string) follower {
	w.t.Helper()
	pool, err := pgxpool.New(context.Background(), w.URL)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(pool.Close)
	p, err := inbox.NewPolicies(pool, inbox.PoliciesConfig{Replica: name, Logger: quiet})
	if err != nil {
		w.t.Fatal(err)
	}
	w.load(p)
	box, err := inbox.New(pool, inbox.Config{Policies: p, Logger: quiet})
	if err != nil {
		w.t.Fatal(err)
	}
	return follower{p, box}
}

// stall returns by how much a goroutine that sleeps and asks the database was late at most, until ctx ends: the part of a
// delay that is the machine's.
func (w *world) stall(ctx context.Context) (worst time.Duration) {
	const pause = 20 * time.Millisecond
	for ctx.Err() == nil {
		began := time.Now()
		time.Sleep(pause)
		if _, err := w.Pool.Exec(context.WithoutCancel(ctx), `select 1`); err != nil {
			w.t.Error(err)
			return worst
		}
		worst = max(worst, time.Since(began)-pause)
	}
	return worst
}

// Every replica follows a change within two seconds of its commit, and says so; by the database's clock, and the machine is
// given what it is late by itself. However slow it is, a replica misses a change once at most: when it has just looked.
func TestB6_EveryReplicaFollowsAChangeWithinTwoSeconds(t *testing.T) {
	w := newWorld(t)
	w.exec(`create table report (replica text, version bigint, at timestamptz);
		create function note() returns trigger language plpgsql as
			$$ begin insert into report values (new.replica, new.version, clock_timestamp()); return null; end $$;
		create trigger note after insert or update on commitbox.inbox_replica for each row execute function note()`)
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	replicas := []follower{w.follower("0"), w.follower("1"), w.follower("2")}
	for _, p := range replicas {
		group.Go(func() {
			if err := p.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	var late time.Duration
	group.Go(func() { late = w.stall(ctx) })
	type change struct {
		version int64
		at      time.Time // just before its commit
	}
	var changes []change
	for n := range 6 {
		var c change
		mode := []inbox.Mode{inbox.ModeOff, inbox.ModePostgres}[n%2]
		var err error
		c.version, err = replicas[0].Set(t.Context(), "c", inbox.Policy{Mode: mode, MaxAttempts: 2 + n, Lease: 90 * time.Second}, "faster")
		if err != nil {
			t.Fatal(err)
		}
		c.at = one[time.Time](w, `select updated_at from commitbox.inbox_policy where consumer = 'c'`)
		changes = append(changes, c)
		for _, r := range replicas {
			w.within(patience, "a replica follows", func() bool {
				at, err := r.Get("c")
				return err == nil && at.Version == c.version && at.Mode == mode && at.MaxAttempts == 2+n && at.Lease == 90*time.Second &&
					at.Level == mode.Level() && at.Retention == 7*24*time.Hour
			})
			m := inbox.ID{Consumer: "c", Message: rand.Text()}
			by := map[inbox.Mode]inbox.DecidedBy{inbox.ModeOff: inbox.ByOff, inbox.ModePostgres: inbox.ByTable}[mode]
			if res, err := inbox.Process(t.Context(), r.box, inbox.Message{ID: m}, effect(m)); err != nil || res.DecidedBy != by {
				t.Errorf("a call under mode %s: %+v %v", mode, res, err)
			}
			if other, err := r.Get("other"); err != nil || other.Mode != inbox.ModePostgres || other.Level != "exactly-once effect" {
				t.Errorf("another consumer: %+v %v", other, err)
			}
		}
		w.within(patience, "every replica has reported the version", func() bool {
			return one[int](w, `select count(*)::int from commitbox.inbox_replica where version = $1`, c.version) == len(replicas)
		})
	}
	if list := replicas[0].List(); len(list) != 2 || list[0].Consumer != inbox.EveryConsumer || list[1].Consumer != "c" {
		t.Errorf("list: %+v", list)
	}
	stop()
	group.Wait()
	for _, c := range changes {
		for n := range replicas {
			followed := one[time.Time](w, `select min(at) from report where replica = $1 and version >= $2`, strconv.Itoa(n), c.version)
			missed := one[int](w, `select count(*)::int from report where replica = $1 and version < $2 and at > $3`, strconv.Itoa(n), c.version, c.at)
			if took := followed.Sub(c.at); took > 2*time.Second+late || missed > 1 {
				t.Errorf("replica %d: version %d after %s and %d looks in vain; the machine was late by %s", n, c.version, took, missed, late)
			}
		}
	}
	if n := one[int](w, `select count(*)::int from commitbox.inbox_replica`); n != 0 {
		t.Errorf("%d replicas are left", n)
	}
}

// The attempts, the backoff and the lease of a policy count, per consumer, and a call keeps what it began with.
func TestB6_AttemptsAndBackoffOfAPolicyCount(t *testing.T) {
	w := newWorld(t)
	p := w.policies(nil)
	box := w.box(inbox.Config{Policies: p})
	set := func(consumer string, policy inbox.Policy) {
		t.Helper()
		if _, err := p.Set(t.Context(), consumer, policy, ""); err != nil {
			t.Fatal(err)
		}
		w.load(p)
	}
	set("strict", inbox.Policy{MaxAttempts: 1})
	fail := func(context.Context, pgx.Tx) (inbox.Void, error) { return inbox.Void{}, errors.New("no") }
	for consumer, want := range map[string]error{"strict": inbox.ErrDead, "other": inbox.ErrFailed} {
		if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: inbox.ID{Consumer: consumer, Message: "m"}}, fail); !errors.Is(err, want) {
			t.Errorf("%s: %v", consumer, err)
		}
	}
	set("strict", inbox.Policy{MaxAttempts: 3, BackoffBase: 2 * time.Hour, BackoffMax: 2 * time.Hour})
	id := inbox.ID{Consumer: "strict", Message: "within"}
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		set("strict", inbox.Policy{MaxAttempts: 1}) // for the next call
		return fail(ctx, tx)
	})
	var e *inbox.Error
	if !errors.As(err, &e) || e.Outcome != inbox.Failed || e.RetryAfter < time.Hour {
		t.Errorf("%v", err)
	}
}

// A value that this version does not know keeps the policy before it, is reported, and is not said to be followed.
func TestB6_AnUnknownValueKeepsTheLastGoodOne(t *testing.T) {
	w := newWorld(t)
	seen := &counts{seen: map[string]float64{}}
	p := w.policies(seen)
	w.mode("c", inbox.ModeDouble, p)
	good, _ := p.Get("c")
	w.exec(`alter table commitbox.inbox_policy drop constraint inbox_policy_mode`)
	w.exec(`update commitbox.inbox_policy set mode = 'triple' where consumer = 'c'`)
	var input *commitbox.InputError
	if err := p.Load(t.Context()); !errors.As(err, &input) {
		t.Errorf("load: %v", err)
	}
	if at, err := p.Get("c"); err != nil || at.Mode != inbox.ModeDouble || at.Version != good.Version {
		t.Errorf("now %+v, %v", at, err)
	}
	if seen.seen["commitbox_inbox_policy_errors[invalid]"] != 1 {
		t.Errorf("counted: %v", seen.seen)
	}
	if one[bool](w, `select min(version) >= (select version from commitbox.inbox_policy where consumer = 'c') from commitbox.inbox_replica`) {
		t.Error("the replica says that it follows what it does not understand")
	}
	// A process that starts now has none before it, and does not take what holds for other consumers instead.
	w.mode(inbox.EveryConsumer, inbox.ModeOff)
	fresh, err := inbox.NewPolicies(w.Pool, inbox.PoliciesConfig{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	if err := fresh.Load(t.Context()); !errors.As(err, &input) {
		t.Errorf("load by a new process: %v", err)
	}
	box := w.box(inbox.Config{Policies: fresh})
	unknown, other := inbox.ID{Consumer: "c", Message: "m"}, inbox.ID{Consumer: "other", Message: "m"}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: unknown}, effect(unknown)); !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("a message whose policy is not known: %v", err)
	}
	if res, err := inbox.Process(t.Context(), box, inbox.Message{ID: other}, effect(other)); err != nil || res.DecidedBy != inbox.ByOff {
		t.Errorf("another consumer: %+v %v", res, err)
	}
	if at, err := fresh.Get("c"); err == nil || len(fresh.List()) != 1 {
		t.Errorf("a new process says %+v", at)
	}
	w.mode("c", inbox.ModePostgres, p, fresh)
	if at, _ := p.Get("c"); at.Mode != inbox.ModePostgres {
		t.Errorf("after it was mended: %+v", at)
	}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: unknown}, effect(unknown)); err != nil {
		t.Errorf("after it was mended: %v", err)
	}
	w.wantEffects(unknown, 1)
}

func TestF19_B6_APolicyThatForgetsTooEarlyIsRefused(t *testing.T) {
	w := newWorld(t)
	p := w.policies(nil)
	for name, policy := range map[string]inbox.Policy{
		"short":     {Retention: time.Hour},
		"mode":      {Mode: "triple"},
		"attempts":  {MaxAttempts: -1},
		"lease":     {Lease: time.Millisecond},
		"inherited": {RetryHorizon: 300 * 24 * time.Hour},
	} {
		var input *commitbox.InputError
		if _, err := p.Set(t.Context(), name, policy, ""); !errors.As(err, &input) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := p.Set(t.Context(), "", inbox.Policy{}, ""); err == nil {
		t.Error("no consumer")
	}
}

// Nothing is handled by a guess: before the policies are known, messages are refused and delivered again.
func TestB6_NothingIsHandledBeforeThePoliciesAreKnown(t *testing.T) {
	w := newWorld(t)
	p, err := inbox.NewPolicies(w.Pool, inbox.PoliciesConfig{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	box := w.box(inbox.Config{Policies: p})
	id := inbox.ID{Consumer: "c", Message: "m"}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, effect(id)); !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("Process: %v", err)
	}
	if _, err := box.Acquire(t.Context(), inbox.Message{ID: id}); !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("Acquire: %v", err)
	}
	tx := w.begin()
	if _, err := inbox.Handle(t.Context(), tx, id, func(context.Context) (inbox.Void, error) { return inbox.Void{}, nil }, inbox.Using(box)); !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("Handle: %v", err)
	}
	answers := inbox.ProcessBatch(t.Context(), box, []inbox.Message{{ID: id}, {ID: inbox.ID{Consumer: "c", Message: "n"}}},
		func(context.Context, pgx.Tx, []inbox.Message) ([]inbox.Void, error) { return nil, nil })
	for _, a := range answers {
		if !errors.Is(a.Err, inbox.ErrUnavailable) {
			t.Errorf("ProcessBatch: %v", a.Err)
		}
	}
	if _, err := inbox.New(w.Pool, inbox.Config{Cache: noCache{}}); err == nil {
		t.Error("a cache without policies is accepted")
	}
}

type noCache struct{ inbox.Cache }

// In mode off every copy runs, is counted, and is said to be decided by nobody. No row is written.
func TestB6_B10_CallsWithoutAGuardAreCounted(t *testing.T) {
	w := newWorld(t)
	seen := &counts{seen: map[string]float64{}}
	p := w.policies(nil)
	w.mode("c", inbox.ModeOff, p)
	box := w.box(inbox.Config{Policies: p, Observer: seen})
	id := inbox.ID{Consumer: "c", Message: "m"}
	for range 2 {
		res, err := inbox.Process(t.Context(), box, inbox.Message{ID: id}, effect(id))
		if err != nil || res.Outcome != inbox.Executed || res.DecidedBy != inbox.ByOff {
			t.Errorf("Process: %+v %v", res, err)
		}
		tx := w.begin()
		if res, err := inbox.Handle(t.Context(), tx, id, func(ctx context.Context) (int, error) { return 7, write(ctx, tx, id, "") }, inbox.Using(box)); err != nil || res.DecidedBy != inbox.ByOff || res.Value != 7 {
			t.Errorf("Handle: %+v %v", res, err)
		}
		w.commit(tx)
	}
	w.wantEffects(id, 4)
	w.wantRow(id, "", 0)
	if seen.seen["commitbox_inbox_unguarded[c off]"] != 4 || seen.seen["commitbox_inbox_handled[c executed off]"] != 4 {
		t.Errorf("counted: %v", seen.seen)
	}
	// What fails is undone and not recorded.
	bad := inbox.ID{Consumer: "c", Message: "bad"}
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: bad}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		return inbox.Void{}, errors.Join(write(ctx, tx, bad, ""), errors.New("no"))
	})
	if !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("Process: %v", err)
	}
	tx := w.begin()
	_, err = inbox.Handle(t.Context(), tx, bad, func(ctx context.Context) (int, error) {
		return 0, errors.Join(write(ctx, tx, bad, ""), errors.New("no"))
	}, inbox.Using(box))
	if !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("Handle: %v", err)
	}
	w.commit(tx)
	if err := inbox.RecordFailure(t.Context(), box, inbox.Message{ID: bad}, err); !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("RecordFailure: %v", err)
	}
	w.wantEffects(bad, 0)
	w.wantRow(bad, "", 0)
}

// A replica that is told to stop while it reports leaves no row behind.
func TestB6_AReplicaThatStopsWhileItReportsLeavesNoRow(t *testing.T) {
	w := newWorld(t)
	p := w.policies(nil)
	w.load(p) // its row
	tx := w.begin()
	if _, err := tx.Exec(t.Context(), `select from commitbox.inbox_replica for update`); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	w.within(patience, "it waits for its row", func() bool {
		return one[bool](w, `select exists (select from pg_locks where not granted)`)
	})
	stop()
	time.Sleep(100 * time.Millisecond) // for a removal that does not wait
	w.commit(tx)
	if err := <-ended; err != nil {
		t.Error(err)
	}
	if n := one[int](w, `select count(*)::int from commitbox.inbox_replica`); n != 0 {
		t.Errorf("%d replicas are left", n)
	}
}

// What follows the policies works through a transaction pooler and in a schema of another name.
func TestB6_PoliciesThroughAPoolerAndInAnotherSchema(t *testing.T) {
	w := newWorld(t)
	if err := migrate.Up(t.Context(), w.Pool, migrate.Config{Schema: "other"}); err != nil {
		t.Fatal(err)
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeSimpleProtocol} {
		cfg, err := pgxpool.ParseConfig(w.Bouncer(t))
		if err != nil {
			t.Fatal(err)
		}
		cfg.ConnConfig.DefaultQueryExecMode = mode
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		for _, schema := range []string{"commitbox", "other"} {
			followPolicies(t, w, pool, schema)
		}
		pool.Close()
	}
}

func followPolicies(t *testing.T, w *world, pool *pgxpool.Pool, schema string) {
	t.Helper()
	p, err := inbox.NewPolicies(pool, inbox.PoliciesConfig{Schema: schema, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- p.Run(ctx) }()
	for _, mode := range []inbox.Mode{inbox.ModeCache, inbox.ModeDouble} {
		version, err := p.Set(t.Context(), "c", inbox.Policy{Mode: mode, Lease: 90 * time.Second}, "a reason")
		if err != nil {
			t.Fatal(err)
		}
		w.within(patience, "the change is followed", func() bool {
			at, err := p.Get("c")
			return err == nil && at.Version == version && at.Mode == mode && at.Stage == inbox.StageBoth
		})
	}
	if done, err := p.Forget(t.Context(), "c", "a reason"); err != nil || !done {
		t.Errorf("forget: %t %v", done, err)
	}
	if _, err := p.RotateCache(t.Context(), "a reason"); err != nil {
		t.Error(err)
	}
	w.within(patience, "the end of the change is followed", func() bool {
		at, err := p.Get("c")
		return err == nil && at.Stage == inbox.StageSettled
	})
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	w.exec(`update ` + schema + `.inbox_policy set mode = 'postgres' where consumer = 'c'`)
	w.exec(`select ` + schema + `.inbox_policy_forget('c')`)
	if n := one[int](w, `select count(*)::int from `+schema+`.inbox_replica`); n != 0 {
		t.Errorf("schema %s: %d replicas are left", schema, n)
	}
}
