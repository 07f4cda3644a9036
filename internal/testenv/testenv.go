// Package testenv gives tests real servers and a fresh database each. It is
// imported by tests only.
//
// A server is looked for in this order: an environment variable with its
// address (COMMITBOX_TEST_POSTGRES or DATABASE_URL, COMMITBOX_TEST_REDIS or
// REDIS_URL, COMMITBOX_TEST_RABBITMQ, RABBITMQ_URL or AMQP_URL), then the
// programs on this machine, from which one server per test process is started,
// then "devservices ensure", which tries to install them. COMMITBOX_PG_BIN
// names the PostgreSQL programs to use.
//
// On a server that is given by its address nothing stays: databases are dropped
// with their test, their template with the last test process, and what a process
// left that was killed by the next one.
//
// A test package that uses testenv calls [Main] in its TestMain.
package testenv

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/commitbox/commitbox/internal/devserver"
)

// Main runs the tests of a package, stops the servers that they shared, and
// fails if a goroutine is left. It does not return.
func Main(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	code := m.Run()
	if err := stopShared(); err != nil {
		fmt.Fprintln(os.Stderr, "testenv: stop the shared servers:", err)
		code = max(code, 1)
	}
	if code != 0 {
		return code // a failed test may well have left a goroutine
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, "testenv:", err)
		return 1
	}
	return 0
}

// server is one server that all tests of a process share.
type server struct {
	name  string   // as "devservices ensure" knows it
	env   []string // variables that may hold its address, first one wins
	start func(context.Context) (*devserver.Server, error)

	once  sync.Once
	own   *devserver.Server
	found string
	err   error
}

// address returns the server's URL; the first caller of a process starts it.
func (s *server) address() (string, error) {
	s.once.Do(func() {
		for _, name := range s.env {
			if s.found = os.Getenv(name); s.found != "" {
				return
			}
		}
		s.own, s.err = startOrInstall(s.name, s.start)
		if s.err == nil {
			s.found = s.own.URL()
		}
	})
	return s.found, s.err
}

// startOrInstall starts a server and tries to install its programs if they are
// missing.
func startOrInstall(name string, start func(context.Context) (*devserver.Server, error)) (*devserver.Server, error) {
	ctx := context.Background()
	s, err := start(ctx)
	var missing *devserver.MissingError
	if !errors.As(err, &missing) {
		return s, err
	}
	if failed := ensure(ctx, name); failed != nil {
		return nil, errors.Join(err, failed)
	}
	return start(ctx)
}

// stopShared ends what the tests of this process shared.
func stopShared() error {
	err := closeAdmin()
	for _, s := range []*server{sharedBouncer, sharedPostgres, sharedRedis, sharedRabbitMQ} {
		if s.own != nil {
			err = errors.Join(err, s.own.Stop())
		}
	}
	return err
}

// randomHex returns 2·n hexadecimal digits.
func randomHex(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails: crypto/rand ends the program instead
	return hex.EncodeToString(b)
}
