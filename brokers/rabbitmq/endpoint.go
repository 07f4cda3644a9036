package rabbitmq

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// connectTimeout bounds the connecting to one node, from the dial to the end of the handshake.
const connectTimeout = 10 * time.Second

// dialFunc opens the transport connection, as [net.Dialer.DialContext] does.
type dialFunc = func(ctx context.Context, network, address string) (net.Conn, error)

// endpoint says how the broker is reached.
type endpoint struct {
	urls []string
	tls  *tls.Config
	dial dialFunc
	name string // shown by the broker's tools
}

func newEndpoint(url string, alternates []string, config *tls.Config, dial dialFunc, name string) (endpoint, error) {
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	e := endpoint{urls: append([]string{url}, alternates...), tls: config, dial: dial, name: name}
	var errs []error
	for i, url := range e.urls {
		// The parser's error quotes parts of the URL, perhaps of its password.
		if _, err := amqp.ParseURI(url); err != nil {
			errs = append(errs, fmt.Errorf("rabbitmq: %s is not an AMQP URL (amqp://user:password@host:5672/vhost, "+
				"with special characters percent-encoded)", urlField(i)))
		}
	}
	return e, errors.Join(errs...)
}

func urlField(i int) string {
	if i == 0 {
		return "URL"
	}
	return fmt.Sprintf("Alternates[%d]", i-1)
}

// connect tries the nodes one after the other, beginning with the first-th, until one answers.
func (e endpoint) connect(ctx context.Context, first int) (*amqp.Connection, net.Conn, error) {
	var errs []error
	for i := range e.urls {
		conn, sock, err := e.open(ctx, e.urls[(first+i)%len(e.urls)])
		if err == nil {
			return conn, sock, nil
		}
		errs = append(errs, err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, nil, fmt.Errorf("rabbitmq: connect: %w", errors.Join(errs...))
}

// open connects to one node. It returns the socket beside the connection: closing the socket is what ends a call of
// the client library that hangs in a read or a write.
func (e endpoint) open(ctx context.Context, url string) (*amqp.Connection, net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	var sock net.Conn
	undo := func() bool { return true }
	config := amqp.Config{
		TLSClientConfig: e.tls.Clone(), // the library writes into it
		Properties:      amqp.NewConnectionProperties(),
		Dial: func(network, address string) (net.Conn, error) {
			conn, err := e.dial(ctx, network, address)
			if err == nil {
				sock, undo = conn, context.AfterFunc(ctx, func() { _ = conn.Close() })
			}
			return conn, err
		},
	}
	config.Properties.SetClientConnectionName(e.name)
	conn, err := amqp.DialConfig(url, config)
	if !undo() {
		err = errors.Join(context.Cause(ctx), err)
	}
	if err == nil {
		return conn, sock, nil
	}
	if sock != nil {
		_ = sock.Close() // the error that matters is at hand
	}
	return nil, nil, err
}
