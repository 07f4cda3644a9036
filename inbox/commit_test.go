package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// proxied is a world whose box talks to PostgreSQL through a proxy, without prepared statements, so that the proxy sees
// the word commit when it is sent.
func proxied(t *testing.T, cfg inbox.Config) (*world, *inbox.Box, *testenv.Proxy) {
	t.Helper()
	w := newWorld(t)
	proxy := testenv.NewProxy(t, w.URL)
	cfg.Logger = quiet
	box, err := inbox.New(through(t, w, proxy), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return w, box, proxy
}

// through is a pool on the other side of a proxy.
func through(t *testing.T, w *world, proxy *testenv.Proxy) *pgxpool.Pool {
	t.Helper()
	poolCfg, err := pgxpool.ParseConfig(proxy.URL(t, w.URL))
	if err != nil {
		t.Fatal(err)
	}
	poolCfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	pool, err := pgxpool.NewWithConfig(t.Context(), poolCfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

const commitOnTheWire = "commit\x00"

func TestF21_LostCommitAnswer(t *testing.T) {
	for _, c := range []struct {
		name     string
		cut      func(*testenv.Proxy) <-chan struct{}
		runs     int
		replayed bool
	}{
		{"committed", func(p *testenv.Proxy) <-chan struct{} { return p.CutAfter(commitOnTheWire) }, 1, true},
		{"rolled back", func(p *testenv.Proxy) <-chan struct{} { return p.CutBefore(commitOnTheWire) }, 2, false},
	} {
		for _, withResult := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, result %v", c.name, withResult), func(t *testing.T) {
				w, box, proxy := proxied(t, inbox.Config{CommitWait: patience})
				runs := 0
				run := func(ctx context.Context, tx pgx.Tx) (int, error) {
					if runs++; runs == 1 {
						c.cut(proxy)
					}
					return 5, write(ctx, tx, anID, "")
				}
				var replayed bool
				var err error
				if withResult {
					var res inbox.Result[int]
					res, err = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, run)
					replayed = res.Replayed && res.Value == 5
				} else {
					var res inbox.Result[inbox.Void]
					res, err = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
						_, err := run(ctx, tx)
						return inbox.Void{}, err
					})
					replayed = res.Replayed
				}
				if err != nil || runs != c.runs || replayed != c.replayed {
					t.Errorf("%d runs, replayed %v, %v", runs, replayed, err)
				}
				w.wantEffects(anID, 1)
			})
		}
	}
}

func TestF21_StillOpenIsUnknown(t *testing.T) {
	w, box, proxy := proxied(t, inbox.Config{CommitWait: 500 * time.Millisecond})
	holder := w.begin()
	held := make(chan error, 1)
	_, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		proxy.CutBefore(commitOnTheWire)
		go func() { // gets the lock when the cut transaction ends, as if that were open still
			_, err := holder.Exec(context.Background(), `select pg_advisory_xact_lock(commitbox.inbox_lock($1, $2))`, anID.Consumer, anID.Message)
			held <- err
		}()
		for one[int](w, `select count(*)::int from pg_locks where locktype = 'advisory' and not granted
			and database = (select oid from pg_database where datname = current_database())`) == 0 {
			time.Sleep(10 * time.Millisecond)
		}
		return inbox.Void{}, write(ctx, tx, anID, "")
	})
	if !errors.Is(err, inbox.ErrOutcomeUnknown) || inbox.Disposition(err).Verdict != inbox.Retry {
		t.Errorf("got %v", err)
	}
	if err := <-held; err != nil {
		t.Fatal(err)
	}
	if err := holder.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
}

func TestF22_CompleteWithALostAnswer(t *testing.T) {
	w, box, proxy := proxied(t, inbox.Config{})
	lease := acquire(t, box, anID)
	proxy.CutAfter("set status = 'completed', result")
	if got, err := inbox.Complete(t.Context(), lease, 4); err != nil || got != 4 {
		t.Errorf("complete: %v, %v", got, err)
	}
	w.wantRow(anID, "completed", 1)

	other := inbox.ID{Consumer: "c", Message: "in"}
	lease = acquire(t, box, other)
	runs := 0
	got, err := inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (int, error) {
		if runs++; runs == 1 {
			proxy.CutAfter(commitOnTheWire)
		}
		return 6, write(ctx, tx, other, "")
	})
	if err != nil || got != 6 || runs != 1 {
		t.Errorf("complete in: %v, %v, %d runs", got, err, runs)
	}
	w.wantEffects(other, 1)
}

func TestF22_RolledBackCompletionKeepsTheLease(t *testing.T) {
	w, box, proxy := proxied(t, inbox.Config{})
	lease := acquire(t, box, anID)
	run := func(cut bool) error {
		_, err := inbox.CompleteIn(t.Context(), lease, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			if cut {
				proxy.CutBefore(commitOnTheWire)
			}
			return inbox.Void{}, write(ctx, tx, anID, "")
		})
		return err
	}
	if err := run(true); !errors.Is(err, inbox.ErrUnavailable) {
		t.Fatalf("got %v", err)
	}
	w.wantEffects(anID, 0)
	if err := run(false); err != nil {
		t.Fatal(err)
	}
	w.wantEffects(anID, 1)
}

func TestB35_KillPointsAroundCommit(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	kill := func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		if err := write(ctx, tx, anID, ""); err != nil {
			return inbox.Void{}, err
		}
		var pid int
		if err := tx.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid); err != nil {
			return inbox.Void{}, err
		}
		w.exec(`select pg_terminate_backend($1)`, pid)
		for one[bool](w, `select exists (select from pg_stat_activity where pid = $1)`, pid) {
			time.Sleep(10 * time.Millisecond)
		}
		return inbox.Void{}, nil
	}
	if _, err := inbox.Process(t.Context(), w.box(inbox.Config{CommitWait: time.Nanosecond}), inbox.Message{ID: anID}, kill); !errors.Is(err, inbox.ErrOutcomeUnknown) && !errors.Is(err, inbox.ErrUnavailable) {
		t.Errorf("killed before commit: %v", err)
	}
	w.wantEffects(anID, 0)
	w.wantRow(anID, "", 0)
	for range 2 {
		if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil {
			t.Fatal(err)
		}
	}
	w.wantEffects(anID, 1)
}

func TestServerRestartsBetweenClaimAndCommit(t *testing.T) {
	t.Parallel()
	server := testenv.PrivatePostgres(t, devserver.PostgresOptions{})
	pool, err := pgxpool.New(t.Context(), server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := migrate.Up(t.Context(), pool, migrate.Config{}); err != nil {
		t.Fatal(err)
	}
	w := &world{&testenv.DB{URL: server.URL(), Pool: pool}, t}
	w.exec(`create table effect (id text, note text)`)
	box := w.box(inbox.Config{CommitWait: patience})
	runs := 0
	_, err = inbox.Process(t.Context(), box, inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		err := write(ctx, tx, anID, "")
		if runs++; runs == 1 {
			err = errors.Join(err, server.Restart(ctx))
		}
		return inbox.Void{}, err
	})
	if err != nil || runs != 2 {
		t.Errorf("%d runs, %v", runs, err)
	}
	w.wantEffects(anID, 1)
}

func TestF15_FullLockTableHalvesTheBatch(t *testing.T) {
	t.Parallel()
	server := testenv.PrivatePostgres(t, devserver.PostgresOptions{MaxConnections: 20, Settings: map[string]string{"max_locks_per_transaction": "10"}})
	pool, err := pgxpool.New(t.Context(), server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := migrate.Up(t.Context(), pool, migrate.Config{}); err != nil {
		t.Fatal(err)
	}
	w := &world{&testenv.DB{URL: server.URL(), Pool: pool}, t}
	w.exec(`create table effect (id text, note text)`)
	capacity := 0
	for tx := w.begin(); ; capacity++ {
		if _, err := tx.Exec(t.Context(), `select pg_advisory_xact_lock($1)`, capacity); err != nil {
			_ = tx.Rollback(t.Context())
			break
		}
	}
	holder := w.begin()
	if _, err := holder.Exec(t.Context(), `select pg_advisory_xact_lock(n) from generate_series(1, $1::int) n`, capacity-100); err != nil {
		t.Fatal(err)
	}
	most := 0
	msgs := messages(200)
	for i, a := range inbox.ProcessBatch(t.Context(), w.box(inbox.Config{}), msgs, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]string, error) {
		most = max(most, len(msgs))
		return writeAll(ctx, tx, msgs)
	}) {
		if a.Err != nil {
			t.Fatalf("%d: %v", i, a.Err)
		}
	}
	if most < 2 || most > 100 {
		t.Errorf("the largest batch had %d messages", most)
	}
}
