package flowtest_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"regexp"
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
)

// right is one privilege on one object.
type right struct{ privilege, object string }

func (r right) sql(verb, role string) string {
	direction := map[string]string{"grant": " to ", "revoke": " from "}[verb]
	return verb + " " + r.privilege + " on " + r.object + direction + role
}

// denial is what PostgreSQL says without the right.
func (r right) denial() string {
	kind, name, typed := strings.Cut(r.object, " ")
	if !typed {
		kind, name = "table", r.object
	}
	name, _, _ = strings.Cut(name, "(")
	return "permission denied for " + kind + " " + strings.TrimPrefix(name, "commitbox.")
}

var grantLine = regexp.MustCompile(`(?m)^//\tgrant (.+) on (.+) to (\w+);$`)

// documented returns the rights of a role in the documentation of package migrations.
func documented(t *testing.T, role string) (rights []right) {
	t.Helper()
	text, err := os.ReadFile("../../migrations/migrations.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, g := range grantLine.FindAllStringSubmatch(string(text), -1) {
		for privilege := range strings.SplitSeq(g[1], ", ") {
			if g[3] == role {
				rights = append(rights, right{privilege, g[2]})
			}
		}
	}
	if len(rights) == 0 {
		t.Fatalf("no rights of role %s are documented", role)
	}
	return rights
}

// actor is a role of the server with the documented rights, and what it does.
type actor struct {
	db   *testenv.DB // as the owner
	role string
	pool *pgxpool.Pool // as the role
	work func(context.Context, *actor) error
}

func TestB88_DocumentedRightsSufficeAndEachIsNeeded(t *testing.T) {
	t.Parallel()
	for role, work := range map[string]func(context.Context, *actor) error{
		"producer": produce, "relay": publish, "consumer": consume, "editor": edit,
	} {
		t.Run(role, func(t *testing.T) {
			t.Parallel()
			rights := documented(t, role)
			a := newActor(t, role, rights, work)
			if err := a.run(t); err != nil {
				t.Fatalf("with all rights: %v", err)
			}
			for _, r := range rights {
				if r == renewing {
					continue // not needed before a lease ends: has a test of its own
				}
				a.exec(t, r.sql("revoke", a.role))
				if err := a.run(t); err == nil || !strings.Contains(err.Error(), r.denial()) {
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

var renewing = right{"update", "commitbox.outbox_relay"}

// A relay that cannot renew its lease says why when the lease has ended.
func TestB88_ARelayThatMayNotRenewSaysWhy(t *testing.T) {
	t.Parallel()
	a := newActor(t, "renewer", documented(t, "relay"), nil)
	a.exec(t, renewing.sql("revoke", a.role))
	relay, err := outbox.NewRelay(a.pool, outbox.PublishFunc(scripted), outbox.RelayConfig{Lease: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the end of the lease", func() bool {
		_, err = relay.RunOnce(t.Context())
		return err != nil
	})
	if !strings.Contains(err.Error(), renewing.denial()) {
		t.Errorf("RunOnce: %v", err)
	}
	if err := relay.Close(); err != nil {
		t.Error(err)
	}
}

func newActor(t *testing.T, role string, rights []right, work func(context.Context, *actor) error) *actor {
	t.Helper()
	db := testenv.Database(t)
	a := &actor{db: db, role: strings.Replace(db.Name, "test", role, 1), work: work}
	a.exec(t, business)
	a.exec(t, "create role "+a.role)
	t.Cleanup(func() { a.drop(t) })
	a.exec(t, "grant insert, select on public.effects to "+a.role)
	for _, r := range rights {
		a.exec(t, r.sql("grant", a.role))
	}
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
		commitbox.resource_version`)
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

// consume handles a message in one transaction and in its own, a copy, a failure, and what comes after one.
func consume(ctx context.Context, a *actor) error {
	box, err := inbox.New(a.pool, inbox.Config{BackoffBase: time.Nanosecond, BackoffMax: time.Nanosecond, Logger: slog.New(slog.DiscardHandler)})
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
	return pgx.BeginFunc(ctx, a.pool, func(tx pgx.Tx) error {
		_, err := inbox.Handle(ctx, tx, inbox.ID{Consumer: "c", Message: "handle"}, func(context.Context) (string, error) { return "result", nil })
		return err
	})
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
