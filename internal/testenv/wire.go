package testenv

import (
	"context"
	"encoding/binary"
	"net"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Wire says what went over the connections that a [WireCounter] watches.
type Wire struct {
	// Statements counts Execute and simple Query messages; a Query with several
	// statements in its text counts as one.
	Statements int
	// RoundTrips counts the turns from sending to receiving.
	RoundTrips int
}

// WireCounter counts statements and round trips of PostgreSQL connections,
// those of connecting included. Its zero value is ready; it is safe for
// concurrent use. It does not see through TLS.
type WireCounter struct {
	mu   sync.Mutex
	wire Wire
}

// Attach makes the counter watch all connections that are opened with the
// configuration.
func (c *WireCounter) Attach(config *pgx.ConnConfig) {
	dial := config.DialFunc
	config.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &countedConn{Conn: conn, counter: c}, nil
	}
}

// Measure returns what went over the wire while do ran.
func (c *WireCounter) Measure(do func()) Wire {
	before := c.total()
	do()
	after := c.total()
	return Wire{
		Statements: after.Statements - before.Statements,
		RoundTrips: after.RoundTrips - before.RoundTrips,
	}
}

func (c *WireCounter) total() Wire {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.wire
}

func (c *WireCounter) add(w Wire) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.wire.Statements += w.Statements
	c.wire.RoundTrips += w.RoundTrips
}

// CountedPool returns a further pool for the database whose traffic is counted.
// It does not ping idle connections, so that counts are the same in each run.
// Note that pgx prepares a statement, in a round trip of its own, when a
// connection meets it for the first time.
func (db *DB) CountedPool(t testing.TB) (*pgxpool.Pool, *WireCounter) {
	t.Helper()
	counter := new(WireCounter)
	return newPool(t, db.URL, func(config *pgxpool.Config) {
		counter.Attach(config.ConnConfig)
		config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	}), counter
}

// countedConn is a client's side of a connection.
type countedConn struct {
	net.Conn
	counter *WireCounter

	mu      sync.Mutex
	wrote   bool
	scanner messageScanner
}

// Write notes the turn before it writes: another goroutine may read the answer
// before this one comes back.
func (c *countedConn) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.wrote = true
	c.mu.Unlock()
	n, err := c.Conn.Write(b)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counter.add(Wire{Statements: c.scanner.statements(b[:n])})
	return n, err
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.mu.Lock()
	defer c.mu.Unlock()
	if n > 0 && c.wrote {
		c.wrote = false
		c.counter.add(Wire{RoundTrips: 1})
	}
	return n, err
}

// messageScanner finds the messages in what a client sends. Each is a type byte,
// a length of four bytes that counts itself, and a body. A session begins with
// messages that have no type.
type messageScanner struct {
	session bool   // the startup message has passed
	head    []byte // the begun head of a message
	body    int    // bytes of the current body still to come
}

// statements returns how many messages in b, or begun before it, make the server
// execute a statement.
func (s *messageScanner) statements(b []byte) (n int) {
	for len(b) > 0 {
		if s.body > 0 {
			skip := min(s.body, len(b))
			s.body -= skip
			b = b[skip:]
			continue
		}
		s.head = append(s.head, b[0])
		b = b[1:]
		if s.finishHead() {
			n++
		}
	}
	return n
}

// finishHead evaluates a complete head and reports whether its message executes
// a statement.
func (s *messageScanner) finishHead() bool {
	const lengthLen = 4
	typeLen := 0
	if s.session {
		typeLen = 1
	}
	if len(s.head) < typeLen+lengthLen {
		return false
	}
	length := int(binary.BigEndian.Uint32(s.head[typeLen:]))
	s.body = length - lengthLen
	executes := s.session && (s.head[0] == 'E' || s.head[0] == 'Q')
	// A request for encryption is eight bytes and comes before the startup.
	s.session = s.session || length > 8
	s.head = s.head[:0]
	return executes
}
