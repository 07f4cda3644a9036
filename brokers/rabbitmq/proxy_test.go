package rabbitmq

import (
	"bufio"
	"encoding/binary"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
)

// method is a method frame on its way through a [proxy].
type method struct {
	fromClient bool
	class, id  uint16
}

var (
	clientChannelOpen = method{true, 20, 10}
	clientPublish     = method{true, 60, 40}
	clientAck         = method{true, 60, 80}
	serverAck         = method{false, 60, 80}
)

// fate says what a proxy does with a frame.
type fate uint8

const (
	pass fate = iota
	drop      // swallow the frame
	cut       // swallow it and break the connection
)

// proxy stands between a client and a broker and reads the frames that go through it.
type proxy struct {
	t        testing.TB
	target   string
	url      string
	listener net.Listener
	wait     sync.WaitGroup

	mu    sync.Mutex
	rule  func(method) fate
	conns map[net.Conn]bool
}

func newProxy(t testing.TB, broker string) *proxy {
	t.Helper()
	u, err := url.Parse(broker)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{t: t, target: u.Host, listener: listener, conns: map[net.Conn]bool{}}
	u.Host = listener.Addr().String()
	p.url = u.String()
	p.wait.Go(p.accept)
	t.Cleanup(p.close)
	return p
}

// set makes rule decide about every method frame from now on; nil passes all.
func (p *proxy) set(rule func(method) fate) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rule = rule
}

// cut breaks all connections.
func (p *proxy) cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for conn := range p.conns {
		conn.Close()
	}
}

func (p *proxy) close() {
	p.listener.Close()
	p.cut()
	p.wait.Wait()
}

func (p *proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := net.Dial("tcp", p.target)
		if err != nil {
			client.Close()
			continue
		}
		p.keep(client, server)
		p.wait.Go(func() { p.pump(client, server, true) })
		p.wait.Go(func() { p.pump(server, client, false) })
	}
}

func (p *proxy) keep(conns ...net.Conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, conn := range conns {
		p.conns[conn] = true
	}
}

// pump moves frames until one of the two connections ends.
func (p *proxy) pump(from, to net.Conn, fromClient bool) {
	defer from.Close()
	defer to.Close()
	r := bufio.NewReader(from)
	if fromClient {
		if _, err := io.CopyN(to, r, int64(len("AMQP0091"))); err != nil {
			return
		}
	}
	skip := false // the header and body frames of a method that was dropped
	for {
		frame, err := readFrame(r)
		if err != nil {
			return
		}
		if frame[0] == 1 {
			f := p.fate(method{fromClient, binary.BigEndian.Uint16(frame[7:]), binary.BigEndian.Uint16(frame[9:])})
			if f == cut {
				return
			}
			skip = f == drop
		}
		if skip && frame[0] <= 3 {
			continue
		}
		if _, err := to.Write(frame); err != nil {
			return
		}
	}
}

func (p *proxy) fate(m method) fate {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rule == nil {
		return pass
	}
	return p.rule(m)
}

// readFrame returns a frame: type, channel, size, payload, end mark.
func readFrame(r io.Reader) ([]byte, error) {
	head := make([]byte, 7)
	if _, err := io.ReadFull(r, head); err != nil {
		return nil, err
	}
	frame := make([]byte, len(head)+int(binary.BigEndian.Uint32(head[3:]))+1)
	copy(frame, head)
	_, err := io.ReadFull(r, frame[len(head):])
	return frame, err
}
