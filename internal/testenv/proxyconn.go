package testenv

import (
	"bytes"
	"net"
	"slices"
	"sync"
	"time"
)

// proxyConn is one connection through a proxy.
type proxyConn struct {
	proxy          *Proxy
	client, server net.Conn
	once           sync.Once
	closed         chan struct{}

	mu      sync.Mutex
	waiting *cut // set when the answer to a pattern is to be withheld
}

// serve forwards one connection until either side closes it.
func (p *Proxy) serve(client net.Conn) {
	server, err := p.dial()
	if err != nil {
		reset(client)
		return
	}
	c := &proxyConn{proxy: p, client: client, server: server, closed: make(chan struct{})}
	defer c.close()
	if !p.add(c) {
		return
	}
	defer p.remove(c)
	var pumps sync.WaitGroup
	pumps.Go(c.pumpToServer)
	pumps.Go(c.pumpToClient)
	pumps.Wait()
}

func (p *Proxy) dial() (net.Conn, error) {
	p.mu.Lock()
	refuse := p.refuse
	p.mu.Unlock()
	if refuse {
		return nil, net.ErrClosed
	}
	return net.DialTimeout("tcp", p.target, 10*time.Second)
}

// add registers a connection; false means that the proxy is closed.
func (p *Proxy) add(c *proxyConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.conns[c] = true
	return true
}

func (p *Proxy) remove(c *proxyConn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.conns, c)
}

// pumpToServer forwards what the client sends and looks for the pattern of a
// cut in it, also where it spans two reads.
func (c *proxyConn) pumpToServer() {
	defer c.close()
	var tail []byte
	c.pump(c.client, ToServer, func(chunk []byte) bool {
		seen := slices.Concat(tail, chunk)
		found := c.proxy.takeCut(seen)
		if found == nil {
			tail = seen[max(0, len(seen)-c.proxy.patternTail()):]
			return write(c.server, chunk)
		}
		if !found.forward {
			c.close()
			close(found.done)
			return false
		}
		c.withhold(found)
		return write(c.server, chunk)
	})
}

// pumpToClient forwards what the server sends, except the answer to a pattern.
func (c *proxyConn) pumpToClient() {
	defer c.close()
	var answer []byte
	c.pump(c.server, ToClient, func(chunk []byte) bool {
		withheld := c.withheld()
		if withheld == nil {
			return write(c.client, chunk)
		}
		answer = append(answer, chunk...)
		if !c.proxy.complete(answer) {
			return true
		}
		c.close()
		close(withheld.done)
		return false
	})
}

// readyForQuery says whether a PostgreSQL server has answered all that it was
// sent: the message of this name (type, length, transaction status) is its last
// word. Before that, a commit at the end of a pipeline may still have to come.
func readyForQuery(answer []byte) bool {
	const messageLen = 6
	return len(answer) >= messageLen && bytes.HasPrefix(answer[len(answer)-messageLen:], []byte("Z\x00\x00\x00\x05"))
}

// anything takes the first bytes for the whole answer.
func anything([]byte) bool { return true }

// pump reads until the connection ends or forward returns false, and applies
// black holes and latency to what it read.
func (c *proxyConn) pump(from net.Conn, d Direction, forward func([]byte) bool) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 && (!c.proxy.delay(d, c.closed) || !forward(buf[:n])) {
			return
		}
		if err != nil {
			return
		}
	}
}

// delay waits as long as the proxy holds bytes back; false means that the
// connection was closed meanwhile.
func (p *Proxy) delay(d Direction, closed <-chan struct{}) bool {
	for {
		p.mu.Lock()
		hole, healed, latency := p.holes[d], p.healed, p.latency
		p.mu.Unlock()
		if !hole {
			return sleep(latency, closed)
		}
		select {
		case <-healed:
		case <-closed:
			return false
		}
	}
}

func sleep(d time.Duration, closed <-chan struct{}) bool {
	if d <= 0 {
		return true
	}
	select {
	case <-time.After(d):
		return true
	case <-closed:
		return false
	}
}

// takeCut returns the pending cut if its pattern is in the bytes; it is given
// out once.
func (p *Proxy) takeCut(b []byte) *cut {
	p.mu.Lock()
	defer p.mu.Unlock()
	found := p.cut
	if found == nil || !bytes.Contains(b, found.pattern) {
		return nil
	}
	p.cut = nil
	return found
}

// patternTail is how many bytes may begin a pattern that the next read ends.
func (p *Proxy) patternTail() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cut == nil {
		return 0
	}
	return max(0, len(p.cut.pattern)-1)
}

func (c *proxyConn) withhold(w *cut) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting = w
}

func (c *proxyConn) withheld() *cut {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waiting
}

// close ends both sides.
func (c *proxyConn) close() {
	c.once.Do(func() {
		close(c.closed)
		_ = c.client.Close()
		_ = c.server.Close()
	})
}

func write(to net.Conn, b []byte) bool {
	_, err := to.Write(b)
	return err == nil
}

// reset closes a connection with a TCP reset.
func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}
