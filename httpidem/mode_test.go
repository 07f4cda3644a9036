package httpidem_test

import (
	"context"
	"crypto/rand"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/httpidem"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// TestModes: what the policy of the consumer http/<name> says holds for requests too. Mode off forgets every key, the others
// answer a copy and refuse another payload, whether the row or Redis remembers; and what is not kept leaves no trace in Redis.
func TestModes(t *testing.T) {
	t.Parallel()
	for _, mode := range []inbox.Mode{inbox.ModePostgres, inbox.ModeDouble, inbox.ModeCache, inbox.ModeOff} {
		t.Run(string(mode), func(t *testing.T) {
			t.Parallel()
			db := testenv.Database(t)
			if _, err := db.Pool.Exec(t.Context(), `create table effect (note text)`); err != nil {
				t.Fatal(err)
			}
			_, err := db.Pool.Exec(t.Context(), `select commitbox.inbox_policy_set('http/orders', jsonb_build_object('mode', $1::text)),
				commitbox.inbox_policy_forget('http/orders')`, string(mode)) // as if it had always been so
			if err != nil {
				t.Fatal(err)
			}
			policies, err := inbox.NewPolicies(db.Pool, inbox.PoliciesConfig{Logger: quiet})
			if err != nil {
				t.Fatal(err)
			}
			if err := policies.Load(t.Context()); err != nil {
				t.Fatal(err)
			}
			front := redisCache(t)
			var failing atomic.Bool
			w := newWorldOn(t, db.Pool, httpidem.Config{Inbox: inbox.Config{Policies: policies, Cache: front, Guard: front}}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
				if failing.Load() {
					w.WriteHeader(http.StatusServiceUnavailable)
					return note(r.Context(), tx, "partial")
				}
				return create(w, r, tx)
			})
			failing.Store(true)
			for range 3 {
				w.wantStatus(w.do(keyed("k")), http.StatusServiceUnavailable)
			}
			failing.Store(false)
			w.wantEffects(0)
			w.wantReplayed(w.do(keyed("k")), false)
			a := w.do(keyed("k"))
			w.wantStatus(a, http.StatusCreated)
			w.wantReplayed(a, mode != inbox.ModeOff)
			if a.body != "made from {}" {
				t.Errorf("the body is %q", a.body)
			}
			if mode != inbox.ModeOff {
				w.wantProblem(w.do(request{keys: []string{`"k"`}, body: "{ }"}), http.StatusUnprocessableEntity)
				w.wantEffects(1)
			}
		})
	}
}

func redisCache(t *testing.T) *cache.Cache {
	t.Helper()
	o, err := redis.ParseURL(testenv.Redis(t))
	if err != nil {
		t.Fatal(err)
	}
	o.ContextTimeoutEnabled, o.MaxRetries = true, -1
	client := redis.NewClient(o)
	prefix := "test-" + rand.Text()
	t.Cleanup(func() {
		ctx := context.Background()
		for _, key := range client.Keys(ctx, prefix+"*").Val() {
			client.Del(ctx, key)
		}
		_ = client.Close()
	})
	c, err := cache.New(client, cache.Config{
		Secrets: [][]byte{[]byte("a secret of the tests, 32 bytes.")}, Prefix: prefix, Timeout: 2 * time.Second, Logger: quiet,
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}
