package flowtest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/optimistic"
	"github.com/commitbox/commitbox/outbox"
	"github.com/commitbox/commitbox/rights"
	"github.com/commitbox/commitbox/scheduler"
)

// right is one privilege on one object.
type right struct{ privilege, object string }

func (r right) sql(verb, role string) string {
	direction := map[string]string{"grant": " to ", "revoke": " from "}[verb]
	return verb + " " + r.privilege + " on " + r.object + direction + role
}

// denies says whether an error is what PostgreSQL says without the right.
func (r right) denies(err error) bool {
	_, name, typed := strings.Cut(r.object, " ")
	if !typed {
		name = r.object
	}
	name, _, _ = strings.Cut(name, "(")
	return err != nil && strings.Contains(err.Error(), "permission denied for ") && strings.Contains(err.Error(), " "+strings.TrimPrefix(name, "commitbox."))
}

// listed returns the rights of a kind of role.
func listed(t *testing.T, db *testenv.DB, kind string) []right {
	t.Helper()
	rows, err := db.Pool.Query(t.Context(), `select p[1], case r.object_type when 'table' then '' else r.object_type || ' ' end || r.object
		from commitbox.rights($1) r, regexp_matches(r.privileges, '(\w+(?: \([^)]*\))?)', 'g') p`, kind)
	if err != nil {
		t.Fatal(err)
	}
	rights, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (r right, err error) {
		return r, row.Scan(&r.privilege, &r.object)
	})
	if err != nil || len(rights) == 0 {
		t.Fatalf("no rights of a role that may %s: %v", kind, err)
	}
	return rights
}

// actor is a role of the server with the rights of a kind, and what it does.
type actor struct {
	db   *testenv.DB // as the owner
	role string
	pool *pgxpool.Pool // as the role
	work func(context.Context, *actor) error
}

func TestB88_GrantedRightsSufficeAndEachIsNeeded(t *testing.T) {
	t.Parallel()
	for role, work := range map[string]func(context.Context, *actor) error{
		"produce": produce, "relay": publish, "consume": consume, "edit": edit, "schedule": schedule, "cleanup": clean,
	} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			a := newActor(t, role, role, work)
			if err := a.run(t); err != nil {
				t.Fatalf("with all rights: %v", err)
			}
			for _, r := range listed(t, a.db, role) {
				if r == renewing {
					continue // not needed before a lease ends: has a test of its own
				}
				a.exec(t, r.sql("revoke", a.role))
				a.checkNamed(t, role, r)
				if err := a.run(t); !r.denies(err) {
					t.Errorf("without %s on %s: %v", r.privilege, r.object, err)
				}
				a.exec(t, r.sql("grant", a.role))
			}
			if err := a.run(t); err != nil {
				t.Errorf("with all rights again: %v", err)
			}
		})
	}
}

// checkNamed checks that a program that starts hears of the right that is missing.
func (a *actor) checkNamed(t *testing.T, kind string, r right) {
	t.Helper()
	err := rights.Check(t.Context(), a.pool, "", rights.Work(kind))
	var missing *rights.MissingError
	named := errors.As(err, &missing) && len(missing.Missing) == 1 && strings.HasPrefix(missing.Missing[0], "grant "+r.privilege+" on ") &&
		strings.Contains(missing.Missing[0], r.object+" to ")
	if !named && (!strings.HasPrefix(r.object, "schema") || !r.denies(err)) {
		t.Errorf("without %s on %s, Check says: %v", r.privilege, r.object, err)
	}
}

var renewing = right{"update", "commitbox.outbox_relay"}

// A relay that cannot renew its lease says why when the lease has ended.
func TestB88_ARelayThatMayNotRenewSaysWhy(t *testing.T) {
	t.Parallel()
	a := newActor(t, "renewer", "relay", nil)
	a.exec(t, renewing.sql("revoke", a.role))
	relay, err := outbox.NewRelay(a.pool, outbox.PublishFunc(scripted), outbox.RelayConfig{Lease: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end of the lease", func() bool {
		_, err = relay.RunOnce(t.Context())
		return err != nil
	})
	if !renewing.denies(err) {
		t.Errorf("RunOnce: %v", err)
	}
	if err := relay.Close(); err != nil {
		t.Error(err)
	}
}

func newActor(t *testing.T, role, kind string, work func(context.Context, *actor) error) *actor {
	t.Helper()
	db := testenv.Database(t)
	a := &actor{db: db, role: strings.Replace(db.Name, "test", role, 1), work: work}
	a.exec(t, business)
	a.exec(t, "create role "+a.role)
	t.Cleanup(func() { a.drop(t) })
	a.exec(t, "grant insert, select on public.effects to "+a.role)
	a.exec(t, "select commitbox.grant_rights('"+kind+"', '"+a.role+"')")
	cfg := db.Pool.Config()
	cfg.ConnConfig.RuntimeParams["role"] = a.role
	var err error
	if a.pool, err = pgxpool.NewWithConfig(context.Background(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.pool.Close)
	return a
}

func (a *actor) exec(t *testing.T, sql string) {
	t.Helper()
	if _, err := a.db.Pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// drop removes the role from the whole server.
func (a *actor) drop(t *testing.T) {
	for _, sql := range []string{"drop owned by " + a.role, "drop role " + a.role} {
		if _, err := a.db.Pool.Exec(context.Background(), sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
}

// run does the role's work on empty tables.
func (a *actor) run(t *testing.T) error {
	t.Helper()
	a.exec(t, `truncate commitbox.inbox, commitbox.inbox_step, commitbox.outbox_message, commitbox.outbox_relay,
		commitbox.outbox_shard, commitbox.outbox_blocked, commitbox.outbox_deferred, commitbox.outbox_dead, commitbox.outbox_channel, commitbox.outbox_scheduled, commitbox.outbox_sent,
		commitbox.resource_version, commitbox.schedule_job, commitbox.inbox_replica`)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return a.work(ctx, a)
}

func produce(ctx context.Context, a *actor) error {
	return pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
		_, err := outbox.Enqueue(ctx, tx, append(slices.Clone(messages), outbox.Message{Topic: "later", DeliverAt: time.Now().Add(time.Hour)})...)
		return err
	})
}

// publish takes messages every way that there is: confirmed at once, after failures, dead at once, dead after failures;
// with a key and without, under both policies for dead messages.
func publish(ctx context.Context, a *actor) error {
	for keep, policy := range []string{"skip", "hold"} {
		if _, err := a.db.Pool.Exec(ctx, `insert into commitbox.outbox_channel values ('default', $1, $2)
			on conflict (channel) do update set dead_policy = excluded.dead_policy, keep_days = excluded.keep_days`, policy, keep); err != nil {
			return err
		}
		if err := a.publishAll(ctx); err != nil {
			return fmt.Errorf("policy %s: %w", policy, err)
		}
		if _, err := a.db.Pool.Exec(ctx, "truncate commitbox.outbox_channel cascade"); err != nil {
			return err
		}
	}
	return nil
}

func (a *actor) publishAll(ctx context.Context) (err error) {
	var list []outbox.Message
	for _, topic := range []string{"fine", "twice", "never", "later never", "moved"} {
		list = append(list, outbox.Message{Topic: topic}, outbox.Message{Topic: topic, Key: topic}, outbox.Message{Topic: topic, Key: topic})
	}
	list = append(list, outbox.Message{Topic: "fine", DeliverAt: time.Now()})
	err = pgx.BeginFunc(ctx, a.db.Pool, func(tx pgx.Tx) error {
		_, err := outbox.Enqueue(ctx, tx, list...)
		return err
	})
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(a.pool, outbox.PublishFunc(a.scripted), outbox.RelayConfig{BackoffBase: time.Millisecond, BackoffMax: time.Millisecond})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, relay.Close()) }()
	const open = `select (select count(*) from commitbox.outbox_scheduled) + (select count(*) from commitbox.outbox_message) + (select count(*) from commitbox.outbox_deferred where attempts > 0)
		+ (select count(*) from commitbox.outbox_blocked where reason = 'retry')`
	for left := 1; left > 0; {
		if _, err := relay.RunOnce(ctx); err != nil {
			return err
		}
		if err := a.db.Pool.QueryRow(ctx, open).Scan(&left); err != nil {
			return err
		}
	}
	return nil
}

// scripted confirms messages of topic "moved" after a later owner would have declared them dead.
func (a *actor) scripted(ctx context.Context, r outbox.Record) error {
	if r.Topic != "moved" {
		return scripted(ctx, r)
	}
	_, err := a.db.Pool.Exec(ctx, `with gone as (delete from commitbox.outbox_message where message_id = $1 returning *)
		insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, key, topic, headers, payload)
		select id, created_at, message_id, shard, 1, channel, key, topic, headers, payload from gone`, r.ID.String())
	return err
}

// scripted answers by topic and attempt.
func scripted(_ context.Context, r outbox.Record) error {
	switch {
	case r.Topic == "never", r.Topic == "later never" && r.Attempt > 1:
		return outbox.Permanent(errors.New("never"))
	case r.Topic == "twice" && r.Attempt <= 2, r.Topic == "later never":
		return errors.New("not yet")
	}
	return nil
}

// consume follows the policies, and handles a message in one transaction and in its own, a copy, a failure, and what comes
// after one.
func consume(ctx context.Context, a *actor) error {
	quiet := slog.New(slog.DiscardHandler)
	policies, err := inbox.NewPolicies(a.pool, inbox.PoliciesConfig{Logger: quiet})
	if err != nil {
		return err
	}
	stopped, stop := context.WithCancel(ctx)
	stop()
	if err := errors.Join(policies.Load(ctx), policies.Run(stopped)); err != nil {
		return err
	}
	box, err := inbox.New(a.pool, inbox.Config{Policies: policies, BackoffBase: time.Nanosecond, BackoffMax: time.Nanosecond, Logger: quiet})
	if err != nil {
		return err
	}
	broken := errors.New("broken")
	for _, step := range []struct{ cause, want error }{{nil, nil}, {broken, inbox.ErrFailed}, {inbox.Permanent(broken), inbox.ErrDead}} {
		msg := inbox.Message{ID: inbox.ID{Consumer: "c", Message: fmt.Sprint(step.want)}, Payload: []byte("p")}
		for _, cause := range []error{step.cause, step.cause} {
			_, err := inbox.Process(ctx, box, msg, func(ctx context.Context, tx pgx.Tx) (string, error) {
				return "result", errors.Join(effect(ctx, tx, msg.ID.Message, nil), cause)
			})
			if !errors.Is(err, step.want) {
				return errors.Join(errors.New("not the answer that is wanted: "+fmt.Sprint(step.want)), err)
			}
		}
	}
	leased := inbox.Message{ID: inbox.ID{Consumer: "c", Message: "leased"}}
	_, err = inbox.ProcessLeased(ctx, box, leased, func(ctx context.Context, lease *inbox.Lease) (string, error) {
		if _, err := inbox.Step(ctx, lease, "step", func(context.Context) (string, error) { return "result", nil }); err != nil {
			return "", err
		}
		return inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (string, error) { return "result", effect(ctx, tx, "leased", nil) })
	})
	if err != nil {
		return err
	}
	return pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
		_, err := inbox.Handle(ctx, tx, inbox.ID{Consumer: "c", Message: "handle"}, func(context.Context) (string, error) { return "result", nil })
		return err
	})
}

// schedule runs a job once and looks at what became of it.
func schedule(ctx context.Context, a *actor) error {
	ctx, stop := context.WithCancelCause(ctx)
	done := errors.New("done")
	job := scheduler.Job{Name: "job", Spec: "@every 100ms", Run: func(context.Context, scheduler.Tick) error { stop(done); return nil }}
	s, err := scheduler.New(a.pool, []scheduler.Job{job}, scheduler.Config{Logger: stopOnDenial(stop)})
	if err != nil {
		return err
	}
	if err := s.Run(ctx); err != nil && context.Cause(ctx) == nil {
		return err
	}
	if cause := context.Cause(ctx); !errors.Is(cause, done) {
		return cause
	}
	_, err = s.Status(context.WithoutCancel(ctx))
	return err
}

// stopOnDenial is a logger that ends what goes on trying without a right.
func stopOnDenial(stop context.CancelCauseFunc) *slog.Logger {
	return slog.New(denials{slog.DiscardHandler, stop})
}

type denials struct {
	slog.Handler
	stop context.CancelCauseFunc
}

func (denials) Enabled(context.Context, slog.Level) bool { return true }

func (d denials) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if err, is := a.Value.Any().(error); is && strings.Contains(err.Error(), "permission denied") {
			d.stop(err)
		}
		return true
	})
	return nil
}

// clean removes a row of every kind.
func clean(ctx context.Context, a *actor) error {
	_, err := a.db.Pool.Exec(ctx, `
		insert into commitbox.inbox (consumer, message_id, status, finished_at, next_attempt_at, received_at)
		select 'c', s, s, case when s <> 'failed' then now() - interval '1 year' end, case when s = 'failed' then now() - interval '1 year' end, now() - interval '1 year'
		  from unnest(array['completed', 'failed', 'dead']) s;
		insert into commitbox.inbox_step (consumer, message_id, name, epoch) select 'c', 'dead', 's', 1;
		insert into commitbox.outbox_channel (channel) values ('default');
		insert into commitbox.outbox_relay (owner, channel, lease_until) values (gen_random_uuid(), 'default', now() - interval '1 day');
		insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, topic, headers, payload, discarded_at, discarded_by)
		select 1, now(), gen_random_uuid(), 0, 1, 'default', 't', '{}', '', now() - interval '1 year', 'x'`)
	if err != nil {
		return err
	}
	cleanup, err := scheduler.NewCleanup(a.pool, scheduler.CleanupConfig{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	report, err := cleanup.RunOnce(ctx)
	if err == nil && (report.Completed != 1 || report.Dead != 1 || report.Abandoned != 1 || report.Discarded != 1 || report.Gone != 1) {
		return fmt.Errorf("not everything was done: %+v", report)
	}
	return err
}

// A role that observes reads how things stand and what is listed, but no content.
func TestB88_ARoleThatObservesReadsNoContent(t *testing.T) {
	t.Parallel()
	a := newActor(t, "observe", "observe", nil)
	for _, sql := range []string{
		"select * from commitbox.outbox_stats('default')", "select * from commitbox.inbox_stats('c')",
		"select consumer, message_id, status, attempts from commitbox.inbox", "select topic, message_id, dead_at from commitbox.outbox_dead",
		"select channel, reason, since, waiting from commitbox.outbox_blocked_keys", "select consumer, mode from commitbox.inbox_policies",
	} {
		if _, err := a.pool.Exec(t.Context(), sql); err != nil {
			t.Errorf("%s: %v", sql, err)
		}
	}
	for _, sql := range []string{
		"select payload from commitbox.outbox_message", "select result from commitbox.inbox", "select headers from commitbox.outbox_dead",
		"select key from commitbox.outbox_blocked_keys", "select * from commitbox.outbox_sent", "delete from commitbox.inbox", "select commitbox.inbox_requeue('c', 'm')",
	} {
		if _, err := a.pool.Exec(t.Context(), sql); err == nil {
			t.Errorf("%s: allowed", sql)
		}
	}
}

// edit makes a resource's version, raises it, and hears that it is too late.
func edit(ctx context.Context, a *actor) error {
	return pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
		for version := range int64(2) {
			if _, err := optimistic.Advance(ctx, tx, "document", "d", version); err != nil {
				return err
			}
		}
		if _, err := optimistic.Advance(ctx, tx, "document", "d", 1); !errors.Is(err, optimistic.ErrConflict) {
			return errors.Join(errors.New("no conflict"), err)
		}
		return nil
	})
}
