package testenv

import (
	"cmp"
	"context"
	"os"
	"testing"

	"github.com/commitbox/commitbox/internal/devserver"
)

var sharedPostgres = &server{
	name: "postgres",
	env:  []string{"COMMITBOX_TEST_POSTGRES", "DATABASE_URL"},
	start: func(ctx context.Context) (*devserver.Server, error) {
		return startPostgres(ctx, devserver.PostgresOptions{})
	},
}

var sharedBouncer = &server{
	name: "pgbouncer",
	env:  []string{"COMMITBOX_TEST_PGBOUNCER"},
	start: func(ctx context.Context) (*devserver.Server, error) {
		target, err := sharedPostgres.address()
		if err != nil {
			return nil, err
		}
		return devserver.StartPgBouncer(ctx, devserver.PgBouncerOptions{Target: target})
	},
}

var sharedRedis = &server{
	name: "redis",
	env:  []string{"COMMITBOX_TEST_REDIS", "REDIS_URL"},
	start: func(ctx context.Context) (*devserver.Server, error) {
		return devserver.StartRedis(ctx, devserver.RedisOptions{})
	},
}

var sharedRabbitMQ = &server{
	name: "rabbitmq",
	env:  []string{"COMMITBOX_TEST_RABBITMQ", "RABBITMQ_URL", "AMQP_URL"},
	start: func(ctx context.Context) (*devserver.Server, error) {
		return devserver.StartRabbitMQ(ctx, devserver.RabbitMQOptions{})
	},
}

// Redis returns the URL of a Redis that all tests share; use keys of your own
// and do not flush it.
func Redis(t testing.TB) string { return sharedAddress(t, sharedRedis) }

// RabbitMQ returns the URL of a RabbitMQ that all tests share; use names of
// your own.
func RabbitMQ(t testing.TB) string { return sharedAddress(t, sharedRabbitMQ) }

func sharedAddress(t testing.TB, s *server) string {
	t.Helper()
	address, err := s.address()
	if err != nil {
		t.Fatal(err)
	}
	return address
}

// PrivatePostgres starts a PostgreSQL for this test alone, which may kill, pause
// and restart it. It is stopped when the test ends.
func PrivatePostgres(t testing.TB, o devserver.PostgresOptions) *devserver.Server {
	t.Helper()
	return private(t, "postgres", func(ctx context.Context) (*devserver.Server, error) {
		return startPostgres(ctx, o)
	})
}

// startPostgres takes the programs that the environment names, if any.
func startPostgres(ctx context.Context, o devserver.PostgresOptions) (*devserver.Server, error) {
	o.BinDir = cmp.Or(o.BinDir, os.Getenv("COMMITBOX_PG_BIN"))
	return devserver.StartPostgres(ctx, o)
}

// PrivateRedis starts a Redis for this test alone.
func PrivateRedis(t testing.TB, o devserver.RedisOptions) *devserver.Server {
	t.Helper()
	return private(t, "redis", func(ctx context.Context) (*devserver.Server, error) {
		return devserver.StartRedis(ctx, o)
	})
}

// PrivateSentinel starts a Sentinel for this test alone, which watches a Redis.
func PrivateSentinel(t testing.TB, name, target string) *devserver.Server {
	t.Helper()
	return private(t, "redis", func(ctx context.Context) (*devserver.Server, error) {
		return devserver.StartSentinel(ctx, name, target)
	})
}

// PrivateRabbitMQ starts a RabbitMQ node for this test alone.
func PrivateRabbitMQ(t testing.TB, o devserver.RabbitMQOptions) *devserver.Server {
	t.Helper()
	return private(t, "rabbitmq", func(ctx context.Context) (*devserver.Server, error) {
		return devserver.StartRabbitMQ(ctx, o)
	})
}

// PrivatePgBouncer starts a PgBouncer for this test alone.
func PrivatePgBouncer(t testing.TB, o devserver.PgBouncerOptions) *devserver.Server {
	t.Helper()
	return private(t, "pgbouncer", func(ctx context.Context) (*devserver.Server, error) {
		return devserver.StartPgBouncer(ctx, o)
	})
}

func private(t testing.TB, name string, start func(context.Context) (*devserver.Server, error)) *devserver.Server {
	t.Helper()
	s, err := startOrInstall(name, start)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(); err != nil {
			t.Error(err)
		}
	})
	return s
}
