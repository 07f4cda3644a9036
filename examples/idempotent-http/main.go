// Command idempotent-http is an order service that can be asked twice. It starts the service on a database of its own, sends
// it the requests of a client with a bad connection, shows each answer, and counts at the end what was done.
//
// What a service would hold is in api.go.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Getenv("DATABASE_URL"), os.Getenv("LISTEN"), os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "idempotent-http:", err)
		stop()
		os.Exit(1)
	}
}

// run plays the story, or, with an address to listen on, serves until ctx ends.
func run(ctx context.Context, databaseURL, listen string, out io.Writer) (err error) {
	slog.SetDefault(slog.New(slog.DiscardHandler)) // the story shows what a client sees
	db, err := exampledb.Create(ctx, databaseURL, tables)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, db.Drop()) }()
	api, err := newAPI(db.Pool)
	if err != nil {
		return err
	}
	address := listen
	if address == "" {
		address = "127.0.0.1:0"
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: api, ReadTimeout: 10 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if listen == "" {
		err = newStory("http://"+listener.Addr().String(), db.Pool, out).tell(ctx)
	} else {
		fmt.Fprintf(out, "listening on http://%s/orders, Ctrl-C ends\n", listener.Addr())
		<-ctx.Done()
	}
	stopping, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err = errors.Join(err, server.Shutdown(stopping))
	if serveErr := <-served; !errors.Is(serveErr, http.ErrServerClosed) {
		err = errors.Join(err, serveErr)
	}
	return err
}
