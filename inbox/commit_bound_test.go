package inbox_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// A COMMIT into a network that has gone silent, and stays so, is given up, and so is the question what became of it, although
// the caller set no bound.
func TestF21_P11_ASilentNetworkIsGivenUp(t *testing.T) {
	for name, c := range map[string]struct {
		mode       pgx.QueryExecMode
		withResult bool
		hole       testenv.Direction
	}{
		"the answer is lost":         {pgx.QueryExecModeCacheStatement, false, testenv.ToClient},
		"the answer is lost, result": {pgx.QueryExecModeExec, true, testenv.ToClient},
		"before COMMIT is sent":      {pgx.QueryExecModeCacheStatement, true, testenv.ToClient}, // its result is to be prepared
		"COMMIT is lost":             {pgx.QueryExecModeCacheStatement, false, testenv.ToServer},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			proxy := testenv.NewProxy(t, w.URL)
			pool := poolWith(t, proxy.URL(t, w.URL), func(cfg *pgxpool.Config) { cfg.ConnConfig.DefaultQueryExecMode = c.mode })
			box, err := inbox.New(pool, inbox.Config{CommitWait: time.Second, Logger: quiet})
			if err != nil {
				t.Fatal(err)
			}
			second, err := pool.Acquire(t.Context()) // it will ask what became of COMMIT, and hear nothing either
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			start := time.Now()
			go func() {
				_, err := processWith(context.Background(), box, c.withResult, func(ctx context.Context, tx pgx.Tx) error {
					err := write(ctx, tx, anID, "")
					second.Release()
					proxy.BlackHole(c.hole)
					return err
				})
				done <- err
			}()
			select {
			case err := <-done:
				if took := time.Since(start); !errors.Is(err, inbox.ErrOutcomeUnknown) || took < 4*time.Second {
					t.Errorf("after %s: %v", took, err)
				}
			case <-time.After(patience):
				proxy.Heal()
				t.Fatalf("no answer within %s; then: %v", patience, <-done)
			}
			proxy.Heal()
			if _, err := inbox.Process(t.Context(), w.box(inbox.Config{Wait: patience}), inbox.Message{ID: anID}, effect(anID)); err != nil {
				t.Error(err)
			}
			w.wantEffects(anID, 1)
		})
	}
}

// processWith handles a message with a result, or without.
func processWith(ctx context.Context, box *inbox.Box, withResult bool, run func(context.Context, pgx.Tx) error) (inbox.Outcome, error) {
	m := inbox.Message{ID: anID}
	if withResult {
		res, err := inbox.Process(ctx, box, m, func(ctx context.Context, tx pgx.Tx) (int, error) { return 5, run(ctx, tx) })
		return res.Outcome, err
	}
	res, err := inbox.Process(ctx, box, m, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) { return inbox.Void{}, run(ctx, tx) })
	return res.Outcome, err
}

func poolWith(t *testing.T, url string, change func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	change(cfg)
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// watched is a connection whose deadlines are seen.
type watched struct {
	net.Conn
	none bool // it has no deadlines, as some tunnels

	mu  sync.Mutex
	set []time.Time
}

func (w *watched) SetDeadline(at time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.set = append(w.set, at)
	if w.none {
		return errors.New("deadlines are not supported")
	}
	return w.Conn.SetDeadline(at)
}

// deadlines returns those that were set since the last call.
func (w *watched) deadlines() []time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	set := w.set
	w.set = nil
	return set
}

// commits notes the bounds of the contexts with which COMMIT is sent.
type commits struct{ bounded []bool }

func (c *commits) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if q.SQL == "commit" {
		_, bounded := ctx.Deadline()
		c.bounded = append(c.bounded, bounded)
	}
	return ctx
}

func (c *commits) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// watch returns a pool of one connection, and what was dialed last.
func watch(t *testing.T, url string, none bool, tracer pgx.QueryTracer) (*pgxpool.Pool, func() *watched) {
	var mu sync.Mutex
	var last *watched
	pool := poolWith(t, url, func(cfg *pgxpool.Config) {
		cfg.MaxConns = 1
		cfg.ConnConfig.Tracer = tracer
		dial := cfg.ConnConfig.DialFunc
		cfg.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			mu.Lock()
			defer mu.Unlock()
			last = &watched{Conn: conn, none: none}
			return last, nil
		}
	})
	if err := pool.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	mu.Lock()
	defer mu.Unlock()
	first := last
	return pool, func() *watched { return first }
}

// The next one who uses the connection finds no deadline on it, neither that of COMMIT nor one of the handler.
func TestF21_NoDeadlineIsLeftOnAConnection(t *testing.T) {
	w := newWorld(t)
	w.exec(`create table late (id text, constraint once unique (id) deferrable initially deferred)`)
	pool, wire := watch(t, w.URL, false, nil)
	box, err := inbox.New(pool, inbox.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	for _, withResult := range []bool{false, true} {
		for name, run := range map[string]func(context.Context, pgx.Tx) error{
			"committed": func(context.Context, pgx.Tx) error { return nil },
			"the handler set one": func(_ context.Context, tx pgx.Tx) error {
				return tx.Conn().PgConn().Conn().SetDeadline(time.Now().Add(time.Hour))
			},
			"refused": func(ctx context.Context, tx pgx.Tx) error {
				_, err := tx.Exec(ctx, `insert into late values ('a'), ('a')`)
				return err
			},
		} {
			w.exec(`delete from commitbox.inbox`)
			wire().deadlines()
			outcome, err := processWith(t.Context(), box, withResult, run)
			if want := map[bool]inbox.Outcome{true: inbox.Failed, false: inbox.Executed}[name == "refused"]; outcome != want {
				t.Errorf("%s: %s, %v", name, outcome, err)
			}
			set := wire().deadlines()
			if len(set) < 2 || !set[len(set)-1].IsZero() {
				t.Errorf("%s: deadlines %v", name, set)
			}
		}
	}
	if n := pool.Stat().NewConnsCount(); n != 1 {
		t.Errorf("%d connections were made", n)
	}
}

// A connection that is given up is closed behind the caller's back, under a deadline which is not taken away.
func TestF21_TheDeadlineOfAClosingConnectionStays(t *testing.T) {
	w := newWorld(t)
	proxy := testenv.NewProxy(t, w.URL)
	pool, wire := watch(t, proxy.URL(t, w.URL), false, nil)
	box, err := inbox.New(pool, inbox.Config{CommitWait: time.Nanosecond, Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	_, err = processWith(t.Context(), box, false, func(context.Context, pgx.Tx) error {
		wire().deadlines()
		proxy.Refuse(true) // the request to cancel
		proxy.BlackHole(testenv.ToClient)
		return nil
	})
	if !errors.Is(err, inbox.ErrOutcomeUnknown) {
		t.Error(err)
	}
	set := wire().deadlines()
	if len(set) == 0 {
		t.Error("no deadline was set")
	}
	for _, at := range set {
		if at.IsZero() {
			t.Errorf("deadlines %v", set)
		}
	}
	proxy.Refuse(false)
	proxy.Heal()
}

// COMMIT is bounded by a context where the connection has no deadlines.
func TestF21_AConnectionWithoutDeadlines(t *testing.T) {
	w := newWorld(t)
	for _, none := range []bool{false, true} {
		sent := new(commits)
		pool, _ := watch(t, w.URL, none, sent)
		box, err := inbox.New(pool, inbox.Config{Logger: quiet})
		if err != nil {
			t.Fatal(err)
		}
		w.exec(`delete from commitbox.inbox`)
		outcome, err := processWith(t.Context(), box, false, func(context.Context, pgx.Tx) error { return nil })
		if err != nil || outcome != inbox.Executed || len(sent.bounded) != 1 || sent.bounded[0] != none {
			t.Errorf("without deadlines %t: %s, %v, bounded contexts %v", none, outcome, err, sent.bounded)
		}
	}
}

// COMMIT is sent although the caller's context has ended, and its answer is heard.
func TestF21_AContextThatEndsAroundCommit(t *testing.T) {
	w, box, proxy := proxied(t, inbox.Config{})
	for name, latency := range map[string]time.Duration{"before": 0, "during": 500 * time.Millisecond} {
		w.exec(`delete from commitbox.inbox; delete from effect`)
		for _, withResult := range []bool{false, true} {
			w.exec(`delete from commitbox.inbox; delete from effect`)
			ctx, cancel := context.WithCancel(t.Context())
			outcome, err := processWith(ctx, box, withResult, func(ctx context.Context, tx pgx.Tx) error {
				err := write(ctx, tx, anID, "")
				proxy.Latency(latency)
				time.AfterFunc(latency/2, cancel)
				if latency == 0 {
					<-ctx.Done()
				}
				return err
			})
			proxy.Latency(0)
			cancel()
			if err != nil || outcome != inbox.Executed {
				t.Errorf("%s, result %t: %s, %v", name, withResult, outcome, err)
			}
			w.wantEffects(anID, 1)
		}
	}
}
