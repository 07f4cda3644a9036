package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
)

// goroutines is a component inside this process, with a connection pool of its own. It stands in for a child process
// where the broker is in memory too. Its kill cuts the database connections first, so that open transactions break
// wherever they are; a real SIGKILL cannot be had in here.
type goroutines struct {
	log    *valve
	cancel context.CancelFunc
	wire   *wire
	gone   chan struct{}
	result error // set before gone is closed
}

func startGoroutines(name, databaseURL string, b broker, note journal) (*goroutines, error) {
	cfg, err := pgxpool.ParseConfig(databaseURL)
	if err != nil {
		return nil, err
	}
	g := &goroutines{log: &valve{}, wire: &wire{}, gone: make(chan struct{})}
	cfg.ConnConfig.DialFunc = g.wire.dial
	ctx, cancel := context.WithCancel(context.Background())
	g.cancel = cancel
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		cancel()
		return nil, err
	}
	go func() {
		defer close(g.gone)
		defer pool.Close()
		g.result = component{name, pool, b, note, newLogger(g.log)}.run(ctx)
		if ctx.Err() != nil && errors.Is(g.result, context.Canceled) {
			g.result = nil
		}
	}()
	return g, nil
}

func (g *goroutines) kill() {
	g.log.shut.Store(true)
	g.wire.cut()
	g.cancel()
	<-g.gone
}

func (g *goroutines) stop() error {
	g.cancel()
	select {
	case <-g.gone:
		return g.result
	case <-time.After(stopTimeout):
		g.kill()
		return fmt.Errorf("did not stop within %s and was cut off", stopTimeout)
	}
}

func (g *goroutines) wait() error {
	<-g.gone
	return g.result
}

// valve is the standard error until it is shut: who is killed says nothing about it.
type valve struct{ shut atomic.Bool }

func (v *valve) Write(text []byte) (int, error) {
	if v.shut.Load() {
		return len(text), nil
	}
	return os.Stderr.Write(text)
}
