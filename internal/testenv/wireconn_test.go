package testenv

import (
	"net"
	"testing"
)

// hastyConn lets Write come back only after the answer has been read.
type hastyConn struct {
	net.Conn
	sent, answered chan struct{}
}

func (c *hastyConn) Write(b []byte) (int, error) {
	close(c.sent)
	<-c.answered
	return len(b), nil
}

func (c *hastyConn) Read(b []byte) (int, error) {
	<-c.sent
	return len(b), nil
}

func TestAnswerBeforeWriteReturnsIsARoundTrip(t *testing.T) {
	t.Parallel()
	counter := new(WireCounter)
	hasty := &hastyConn{sent: make(chan struct{}), answered: make(chan struct{})}
	conn := &countedConn{Conn: hasty, counter: counter}
	got := counter.Measure(func() {
		go func() {
			defer close(hasty.answered)
			_, _ = conn.Read(make([]byte, 1)) // never fails
		}()
		_, _ = conn.Write([]byte{0}) // never fails
	})
	if got.RoundTrips != 1 {
		t.Errorf("%d round trips, want 1", got.RoundTrips)
	}
}
