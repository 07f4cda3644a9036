package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

const (
	// closePatience is how long the broker may take to answer the closing of a channel. After that the connection is
	// taken for dead.
	closePatience = 3 * time.Second
	// returnsMin is the least number of returned messages that a channel has room for.
	returnsMin = 256
)

// link is one connection and what is known about it. The client library knows no contexts and gives up a hanging
// write only when the socket is closed, so a link keeps the socket and closes it.
type link struct {
	conn    *amqp.Connection
	sock    net.Conn
	gone    chan struct{}          // closed when the connection has ended
	reason  *amqp.Error            // why it ended, for whoever has waited for gone; nil if it was closed in order
	blocked atomic.Pointer[string] // the broker's reason while it takes no publishes
	work    *sync.WaitGroup        // the goroutines of this link

	mu   sync.Mutex
	idle []*channel
}

func newLink(conn *amqp.Connection, sock net.Conn, work *sync.WaitGroup) *link {
	l := &link{conn: conn, sock: sock, gone: make(chan struct{}), work: work}
	closes := conn.NotifyClose(make(chan *amqp.Error, 1))
	blocks := conn.NotifyBlocked(make(chan amqp.Blocking, 16))
	work.Go(func() { l.watch(closes, blocks) })
	return l
}

// watch follows the connection to its end. It then closes the socket itself, because the library wants a lock before
// it does so, and a hanging write may hold that lock.
func (l *link) watch(closes <-chan *amqp.Error, blocks <-chan amqp.Blocking) {
	defer close(l.gone)
	for {
		select {
		case l.reason = <-closes:
			l.sever()
			return
		case b, open := <-blocks:
			switch {
			case !open:
				blocks = nil
			case b.Active:
				l.blocked.Store(&b.Reason)
			default:
				l.blocked.Store(nil)
			}
		}
	}
}

// sever closes the socket at once. Every call on the link comes back.
func (l *link) sever() { _ = l.sock.Close() }

// alive tells whether the connection was not seen to have ended.
func (l *link) alive() bool { return !l.conn.IsClosed() }

// blockedError returns why the broker takes no publishes, or nil.
func (l *link) blockedError() error {
	if reason := l.blocked.Load(); reason != nil {
		return fmt.Errorf("%w (%s)", ErrBlocked, *reason)
	}
	return nil
}

// bounded makes a call of the client library that waits for the broker's answer. When ctx ends first the connection
// is severed, which brings the call back.
func (l *link) bounded(ctx context.Context, call func() error) error {
	undo := context.AfterFunc(ctx, l.sever)
	err := call()
	if !undo() {
		return errors.Join(context.Cause(ctx), err)
	}
	return err
}

// close says goodbye to the broker, which makes sure that it has read everything, and severs the connection when it
// does not answer before ctx ends or cannot listen.
func (l *link) close(ctx context.Context) {
	deadline := time.Now().Add(closePatience)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if l.blocked.Load() == nil {
		_ = l.bounded(ctx, func() error { return l.conn.CloseDeadline(deadline) })
	}
	l.sever()
	<-l.gone
}

// channel is an AMQP channel in confirm mode.
type channel struct {
	*amqp.Channel
	link    *link
	closes  chan *amqp.Error
	returns chan amqp.Return // has room for every message of a batch: the library waits for nobody and drops the rest
}

// borrow returns a channel for a batch of the given size, for one user.
func (l *link) borrow(ctx context.Context, size int) (*channel, error) {
	for c := l.takeIdle(); c != nil; c = l.takeIdle() {
		if !c.IsClosed() && cap(c.returns) >= size {
			return c, nil
		}
		l.retire(c)
	}
	var c *channel
	err := l.bounded(ctx, func() (err error) {
		c, err = l.openChannel(max(size, returnsMin))
		return err
	})
	return c, err
}

func (l *link) openChannel(size int) (*channel, error) {
	ch, err := l.conn.Channel()
	if err != nil {
		return nil, err
	}
	c := &channel{
		Channel: ch,
		link:    l,
		closes:  ch.NotifyClose(make(chan *amqp.Error, 1)),
		returns: ch.NotifyReturn(make(chan amqp.Return, size)),
	}
	return c, ch.Confirm(false)
}

func (l *link) takeIdle() *channel {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.idle)
	if n == 0 {
		return nil
	}
	c := l.idle[n-1]
	l.idle = l.idle[:n-1]
	return c
}

// giveBack keeps a channel, all of whose messages were answered, for the next batch.
func (l *link) giveBack(c *channel) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.idle = append(l.idle, c)
}

// retire throws a channel away in the background. A broker that does not answer is taken for dead, unless it has said
// that it does not listen: it then will answer later, and a new connection would only send it further copies.
func (l *link) retire(c *channel) {
	if c.IsClosed() {
		return
	}
	l.work.Go(func() {
		patience := time.AfterFunc(closePatience, func() {
			if l.blocked.Load() == nil {
				l.sever()
			}
		})
		defer patience.Stop()
		_ = c.Close() // what it was used for has failed before
	})
}

// closeError returns why the channel was closed; nil if nobody said so.
func (c *channel) closeError(ctx context.Context) *amqp.Error {
	select {
	case err := <-c.closes:
		return err
	case <-ctx.Done():
		return nil
	}
}
