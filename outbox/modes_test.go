package outbox_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// A pool's mode is what stands between here and the server asks for; the relay works in each.
func TestRelayInEveryModeOfThePool(t *testing.T) {
	t.Parallel()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			db := testenv.Database(t)
			cfg := db.Pool.Config()
			cfg.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			must(t, err)
			t.Cleanup(pool.Close)
			var want []string
			for i := range 20 {
				want = append(want, fmt.Sprint(i))
				enqueue(t, db, message("k", fmt.Sprint(i)))
			}
			enqueue(t, db, message("", "free"), outbox.Message{Topic: "test", ContentType: "text/plain", Headers: map[string]string{"a": "b"}})
			p := &recorder{}
			start(t, newRelay(t, pool, p, brisk()))
			eventually(t, "all messages", func() bool { return len(p.payloads()) == 22 })
			eventually(t, "the end", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 0, blocked 0" })
			if diff := cmp.Diff(want, p.payloads("k")); diff != "" {
				t.Error(diff)
			}
		})
	}
}
