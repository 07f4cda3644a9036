package testenv

import (
	"net"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"
)

// Direction is one way through a [Proxy].
type Direction int

// The two ways through a proxy.
const (
	ToServer Direction = iota
	ToClient
)

// Proxy is a TCP proxy on loopback that disturbs connections on demand. A new
// one only forwards. Its methods are safe for concurrent use and apply to open
// and to later connections.
type Proxy struct {
	target   string // host:port
	complete func(answer []byte) bool
	listener net.Listener
	running  sync.WaitGroup

	mu      sync.Mutex
	conns   map[*proxyConn]bool
	refuse  bool
	latency time.Duration
	holes   [2]bool
	healed  chan struct{} // closed by Heal
	cut     *cut
	closed  bool
}

// cut is a request to close the connection that sends a pattern.
type cut struct {
	pattern []byte
	forward bool // the server sees the bytes, and its answer is awaited
	done    chan struct{}
}

// NewProxy starts a proxy in front of a server, given as a URL. It is closed when
// the test ends.
func NewProxy(t testing.TB, target string) *Proxy {
	t.Helper()
	u, err := url.Parse(target)
	if err != nil || u.Host == "" {
		t.Fatalf("testenv: the target of a proxy must be a URL, not %q", target)
	}
	complete := anything
	if strings.HasPrefix(u.Scheme, "postgres") {
		complete = readyForQuery
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{
		target:   u.Host,
		complete: complete,
		listener: listener,
		conns:    make(map[*proxyConn]bool),
		healed:   make(chan struct{}),
	}
	p.running.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// Addr is the proxy's host:port.
func (p *Proxy) Addr() string { return p.listener.Addr().String() }

// URL returns a server's URL with the proxy's address in it.
func (p *Proxy) URL(t testing.TB, server string) string {
	t.Helper()
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	u.Host = p.Addr()
	return u.String()
}

// Latency delays whatever passes, in each direction, by d.
func (p *Proxy) Latency(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.latency = d
}

// Cut closes all open connections. New ones are accepted.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.close()
	}
}

// Refuse says whether new connections are reset at once. Open ones go on.
func (p *Proxy) Refuse(refuse bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.refuse = refuse
}

// BlackHole holds back all bytes of one direction, as a network partition does:
// both sides keep their connection and hear nothing.
func (p *Proxy) BlackHole(d Direction) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.holes[d] = true
}

// Heal ends all black holes; the bytes that they held are delivered.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.holes = [2]bool{}
	close(p.healed)
	p.healed = make(chan struct{})
}

// CutAfter waits for a client to send the pattern, lets the server see it,
// withholds the server's answer and closes the connection when that answer is
// complete: with "commit" as pattern the transaction is committed and its client
// does not know. (Of servers other than PostgreSQL the first bytes are taken for
// the whole answer.) Only the next match is cut; the channel is closed then. A
// later CutAfter or CutBefore replaces one that did not match yet.
func (p *Proxy) CutAfter(pattern string) <-chan struct{} { return p.cutAt(pattern, true) }

// CutBefore is like [Proxy.CutAfter] but closes the connection before the server
// sees the pattern.
func (p *Proxy) CutBefore(pattern string) <-chan struct{} { return p.cutAt(pattern, false) }

func (p *Proxy) cutAt(pattern string, forward bool) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cut = &cut{pattern: []byte(pattern), forward: forward, done: make(chan struct{})}
	return p.cut.done
}

// accept runs until the listener is closed.
func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.serve(client) })
	}
}

func (p *Proxy) close() {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	_ = p.listener.Close()
	p.Cut()
	p.running.Wait()
}
