package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/scheduler"
)

// mortal dies at its n-th message to the server, of all its connections: before the server gets it, or right after.
type mortal struct {
	after bool

	mu    sync.Mutex
	left  int
	conns []net.Conn
}

var errDead = errors.New("this process has died")

func (m *mortal) dial(ctx context.Context, network, address string) (net.Conn, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left <= 0 {
		return nil, errDead
	}
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	m.conns = append(m.conns, conn)
	return &mortalConn{conn, m}, nil
}

type mortalConn struct {
	net.Conn
	m *mortal
}

func (c *mortalConn) Write(b []byte) (int, error) {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	if c.m.left <= 0 {
		return 0, errDead
	}
	c.m.left--
	if c.m.left > 0 {
		return c.Conn.Write(b)
	}
	if c.m.after {
		_, _ = c.Conn.Write(b)
	}
	for _, conn := range c.m.conns {
		_ = conn.Close()
	}
	return 0, errDead
}

// A cleaner that dies at any statement leaves no lock, no open transaction and no row in between: the next one finishes what
// was begun, and the end is the same.
func TestP13_ACleanerMayDieAtEveryStatement(t *testing.T) {
	// To die right after message n and right before n+1 leaves the same, so odd numbers of both are every place there is.
	step := 2
	if os.Getenv("COMMITBOX_SOAK") != "" {
		step = 1
	}
	const parts = 3 // at once, because most of the time is spent waiting
	for name, after := range map[string]bool{"before the server gets it": false, "before the answer comes": true} {
		for part := range parts {
			t.Run(fmt.Sprint(name, ", part ", part), func(t *testing.T) {
				newRooms(t).dieFrom(1+part*step, parts*step, after)
			})
		}
	}
}

// dieFrom lets cleaners die at their n-th message, and at every one that is so many steps later.
func (r *rooms) dieFrom(n, step int, after bool) {
	r.t.Helper()
	r.exec(`select commitbox.outbox_sent_days(7, 0)`)
	for survived := false; !survived; n += step {
		r.fill()
		m := &mortal{after: after, left: n}
		survived = r.dieAt(m)
		r.checkNothingIsHeld()
		second := r.cleanup(r.Pool, scheduler.CleanupConfig{})
		eventually(r.t, "the end of the dead one's sessions", func() bool { return !r.clean(second).Skipped })
		r.checkLeft()
		if r.t.Failed() {
			r.t.Fatalf("died at message %d", n)
		}
		if survived && n < 30 {
			r.t.Errorf("a run has only %d messages", n)
		}
	}
}

// dieAt runs a cleaner and says whether it lived to the end.
func (r *rooms) dieAt(m *mortal) bool {
	r.t.Helper()
	cfg, err := pgxpool.ParseConfig(r.URL)
	if err != nil {
		r.t.Fatal(err)
	}
	cfg.ConnConfig.DialFunc = m.dial
	cfg.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec // one message for each statement
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	defer pool.Close()
	_, err = r.cleanup(pool, scheduler.CleanupConfig{Batch: 12}).RunOnce(context.Background())
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.left > 0 && err != nil {
		r.t.Error(err)
	}
	return m.left > 0
}

// checkNothingIsHeld waits for the sessions of the dead one to end: what is committed by then is what it leaves.
func (r *rooms) checkNothingIsHeld() {
	r.t.Helper()
	eventually(r.t, "the end of all locks and transactions", func() bool {
		return r.count(`select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid() and state <> 'idle'`) == 0 &&
			r.count(`select count(*) from pg_locks l where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())`) == 0
	})
	if n := r.count(`select count(*) from commitbox.inbox where message_id like 'kept%' or message_id like 'gone%' and status not in ('completed', 'dead')`); n != 40 {
		r.t.Errorf("%d rows that have to be kept", n)
	}
}
