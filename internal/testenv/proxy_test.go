package testenv_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/testenv"
)

// throughProxy returns a proxy in front of a new empty database, with a table,
// and a connection through it.
func throughProxy(t *testing.T) (*testenv.Proxy, *testenv.DB, *pgx.Conn) {
	t.Helper()
	db := testenv.EmptyDatabase(t)
	if _, err := db.Pool.Exec(t.Context(), `CREATE TABLE effect (id int)`); err != nil {
		t.Fatal(err)
	}
	proxy := testenv.NewProxy(t, db.URL)
	return proxy, db, connect(t, proxy.URL(t, db.URL))
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func effects(t *testing.T, db *testenv.DB) (n int) {
	t.Helper()
	if err := db.Pool.QueryRow(t.Context(), `SELECT count(*) FROM effect`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// commitOne inserts a row in a transaction and returns what Commit says.
func commitOne(t *testing.T, conn *pgx.Conn) error {
	t.Helper()
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `INSERT INTO effect VALUES (1)`); err != nil {
		t.Fatal(err)
	}
	return tx.Commit(t.Context())
}

func TestProxyForwards(t *testing.T) {
	t.Parallel()
	_, db, conn := throughProxy(t)
	if err := commitOne(t, conn); err != nil {
		t.Fatal(err)
	}
	if n := effects(t, db); n != 1 {
		t.Errorf("%d rows, want 1", n)
	}
}

func TestProxyCutsBetweenCommitAndItsAnswer(t *testing.T) {
	t.Parallel()
	proxy, db, conn := throughProxy(t)
	cut := proxy.CutAfter("commit")
	if err := commitOne(t, conn); err == nil {
		t.Fatal("the client heard that its transaction is committed")
	}
	<-cut
	if n := effects(t, db); n != 1 {
		t.Errorf("%d rows after a COMMIT whose answer was lost, want 1", n)
	}
	if err := commitOne(t, connect(t, proxy.URL(t, db.URL))); err != nil {
		t.Errorf("the second commit was cut, too: %v", err)
	}
}

// TestProxyAwaitsACommitInAPipeline sends the commit together with statements
// whose answers come long before its own.
func TestProxyAwaitsACommitInAPipeline(t *testing.T) {
	t.Parallel()
	proxy, db, conn := throughProxy(t)
	cut := proxy.CutAfter("commit")
	const script = `BEGIN; INSERT INTO effect VALUES (1); SELECT repeat('x', 100000); SELECT pg_sleep(0.3); commit`
	if _, err := conn.Exec(t.Context(), script); err == nil {
		t.Fatal("the client heard that its transaction is committed")
	}
	<-cut
	if n := effects(t, db); n != 1 {
		t.Errorf("%d rows, want 1: the connection was cut before the commit", n)
	}
}

func TestProxyCutsBeforeCommit(t *testing.T) {
	t.Parallel()
	proxy, db, conn := throughProxy(t)
	cut := proxy.CutBefore("commit")
	if err := commitOne(t, conn); err == nil {
		t.Fatal("the client heard that its transaction is committed")
	}
	<-cut
	if n := effects(t, db); n != 0 {
		t.Errorf("%d rows after a COMMIT that never arrived, want none", n)
	}
}

func TestProxyFindsAPatternAcrossReads(t *testing.T) {
	t.Parallel()
	proxy, _, conn := throughProxy(t)
	cut := proxy.CutBefore("12345678")
	raw := conn.PgConn().Conn()
	for _, part := range []string{"Q\x00\x00\x00\x20SELECT 1234", "5678"} {
		if _, err := raw.Write([]byte(part)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(50 * time.Millisecond) // two writes, two reads
	}
	select {
	case <-cut:
	case <-time.After(10 * time.Second):
		t.Error("the pattern was not found")
	}
}

func TestProxyCut(t *testing.T) {
	t.Parallel()
	proxy, db, conn := throughProxy(t)
	proxy.Cut()
	if err := conn.Ping(t.Context()); err == nil {
		t.Error("the connection lives on")
	}
	if err := connect(t, proxy.URL(t, db.URL)).Ping(t.Context()); err != nil {
		t.Errorf("a new connection: %v", err)
	}
}

func TestProxyRefuse(t *testing.T) {
	t.Parallel()
	proxy, db, conn := throughProxy(t)
	proxy.Refuse(true)
	if second, err := pgx.Connect(t.Context(), proxy.URL(t, db.URL)); err == nil {
		second.Close(t.Context())
		t.Error("a new connection was accepted")
	}
	if err := conn.Ping(t.Context()); err != nil {
		t.Errorf("the open connection: %v", err)
	}
	proxy.Refuse(false)
	connect(t, proxy.URL(t, db.URL))
}

func TestProxyBlackHole(t *testing.T) {
	t.Parallel()
	for name, direction := range map[string]testenv.Direction{"to server": testenv.ToServer, "to client": testenv.ToClient} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, db, conn := throughProxy(t)
			proxy.BlackHole(direction)
			done := make(chan error, 1)
			go func() {
				_, err := conn.Exec(context.Background(), `INSERT INTO effect VALUES (1)`)
				done <- err
			}()
			select {
			case err := <-done:
				t.Fatalf("an answer came out of a black hole: %v", err)
			case <-time.After(300 * time.Millisecond):
			}
			if arrived := effects(t, db) == 1; arrived != (direction == testenv.ToClient) {
				t.Errorf("the statement arrived: %v", arrived)
			}
			proxy.Heal()
			if err := <-done; err != nil {
				t.Errorf("after Heal: %v", err)
			}
		})
	}
}

func TestProxyLatency(t *testing.T) {
	t.Parallel()
	proxy, _, conn := throughProxy(t)
	proxy.Latency(150 * time.Millisecond)
	begin := time.Now()
	if err := conn.Ping(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took < 300*time.Millisecond {
		t.Errorf("a round trip took %v, want at least twice the latency", took)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := conn.Ping(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a ping with less time than the latency: %v", err)
	}
}
