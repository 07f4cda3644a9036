package bench

import (
	"context"
	"crypto/rand"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// newPolicyInbox is a box that works by the policies of the database and has a Redis.
func newPolicyInbox(b *testing.B, pool *pgxpool.Pool, mode inbox.Mode) *inbox.Box {
	b.Helper()
	options, err := redis.ParseURL(testenv.Redis(b))
	if err != nil {
		b.Fatal(err)
	}
	options.ContextTimeoutEnabled, options.PoolSize = true, workers
	client := redis.NewClient(options)
	b.Cleanup(func() { _ = client.Close() })
	front, err := cache.New(client, cache.Config{Secrets: [][]byte{[]byte(rand.Text())}, Prefix: "bench-" + rand.Text(), Timeout: time.Second})
	if err != nil {
		b.Fatal(err)
	}
	run(b, pool, "select commitbox.inbox_policy_set($1, jsonb_build_object('mode', $2::text))", consumer, string(mode))
	policies, err := inbox.NewPolicies(pool, inbox.PoliciesConfig{})
	if err != nil {
		b.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error)
	if err := policies.Load(ctx); err != nil {
		b.Fatal(err)
	}
	go func() { ended <- policies.Run(ctx) }()
	b.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			b.Error(err)
		}
	})
	box, err := inbox.New(pool, inbox.Config{Policies: policies, Cache: front, Guard: front})
	if err != nil {
		b.Fatal(err)
	}
	return box
}

// BenchmarkPolicyDuplicate compares duplicates that the cache answers with those that PostgreSQL answers.
func BenchmarkPolicyDuplicate(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, workers)
	double, table := newPolicyInbox(b, pool, inbox.ModeDouble), newInbox(b, pool, "")
	known := make([]string, sized(100, 2_000, 10_000))
	perSecond(b, workers, len(known), func(ctx context.Context, i int) error {
		known[i] = messageID()
		return process(ctx, double, known[i])
	})
	n := sized(500, 40_000, 100_000)
	again := func(name string, box *inbox.Box) contender {
		return contender{name, func(b *testing.B) float64 {
			return perSecond(b, workers, n, func(ctx context.Context, i int) error { return replay(ctx, box, known[i%len(known)]) })
		}}
	}
	const cached, read = "mode double", "mode postgres"
	f := interleave(b, rounds(b), again(cached, double), again(read, table))
	r := newReport(b, db, "Inbox: duplicates answered by the cache and by PostgreSQL",
		fmt.Sprintf("%d duplicates of %d messages per round, %d rounds, %d workers", n, len(known), rounds(b), workers))
	r.figures("msg/s", f)
	r.atLeast("mode double over mode postgres", f.ratio(cached, read), 5)
	r.print()
}

// BenchmarkPolicyFirstDelivery compares first deliveries in mode double, which asks and fills the cache, with mode postgres.
func BenchmarkPolicyFirstDelivery(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, workers)
	double, table := newPolicyInbox(b, pool, inbox.ModeDouble), newInbox(b, pool, "")
	n := sized(200, 3_000, 10_000)
	first := func(name string, box *inbox.Box) contender {
		return contender{name, func(b *testing.B) float64 {
			run(b, pool, "truncate public.business, commitbox.inbox, commitbox.inbox_step")
			rate := perSecond(b, workers, n, func(ctx context.Context, _ int) error { return process(ctx, box, messageID()) })
			if got := count(b, pool, "select count(*) from public.business"); got != n {
				b.Fatalf("%s: %d business rows after %d messages", name, got, n)
			}
			return rate
		}}
	}
	const cached, plain = "mode double", "mode postgres"
	f := interleave(b, turns(b), first(cached, double), first(plain, table))
	r := newReport(b, db, "Inbox: first deliveries with a cache in front",
		fmt.Sprintf("%d messages per round, %d rounds, %d workers", n, turns(b), workers))
	r.figures("msg/s", f)
	r.atLeast("mode double over mode postgres", f.ratio(cached, plain), 0.85)
	r.print()
}
