package main

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"time"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/commitbox/commitbox/internal/devserver"
)

// image is a container image that serves as a service.
type image struct {
	reference func(want) string
	port      string
	env       map[string]string
	command   []string
	ready     wait.Strategy
	url       string // with %s for host:port
}

var postgresImage = image{
	reference: func(w want) string {
		return fmt.Sprintf("postgres:%d-alpine", cmp.Or(w.postgres, devserver.PostgresDefault))
	},
	port: "5432/tcp",
	env:  map[string]string{"POSTGRES_HOST_AUTH_METHOD": "trust"},
	command: []string{
		"postgres", "-c", "max_connections=200",
		"-c", "fsync=off", "-c", "full_page_writes=off", "-c", "synchronous_commit=off",
	},
	// The image starts the server once to set it up and once to stay.
	ready: wait.ForLog("database system is ready to accept connections").WithOccurrence(2),
	url:   "postgres://postgres@%s/postgres?sslmode=disable",
}

var redisImage = image{
	reference: func(want) string { return "redis:7-alpine" },
	port:      "6379/tcp",
	command:   []string{"redis-server", "--save", ""},
	ready:     wait.ForLog("Ready to accept connections"),
	url:       "redis://%s/0",
}

var rabbitmqImage = image{
	reference: func(want) string { return "rabbitmq:3-alpine" },
	port:      "5672/tcp",
	ready:     wait.ForLog("Server startup complete"),
	url:       "amqp://guest:guest@%s/",
}

// start runs the image and waits until it serves.
func (i image) start(ctx context.Context, w want) (running, error) {
	if err := prepareTestcontainers(); err != nil {
		return running{}, err
	}
	container, err := testcontainers.Run(ctx, i.reference(w),
		testcontainers.WithExposedPorts(i.port),
		testcontainers.WithEnv(i.env),
		testcontainers.WithCmd(i.command...),
		testcontainers.WithWaitStrategyAndDeadline(2*time.Minute, i.ready, wait.ForListeningPort(i.port)),
	)
	stop := func() error { return testcontainers.TerminateContainer(container) }
	if err != nil {
		_ = stop() // the first error says more
		return running{}, fmt.Errorf("run image %s: %w", i.reference(w), err)
	}
	address, err := container.PortEndpoint(ctx, i.port, "")
	if err != nil {
		_ = stop()
		return running{}, fmt.Errorf("address of image %s: %w", i.reference(w), err)
	}
	return running{url: fmt.Sprintf(i.url, address), stop: stop}, nil
}

// prepareTestcontainers keeps all traffic on loopback and does without the
// helper container that removes others: devservices stops what it starts.
func prepareTestcontainers() error {
	if err := os.Setenv("TESTCONTAINERS_HOST_OVERRIDE", "127.0.0.1"); err != nil {
		return err
	}
	return os.Setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
}

// dockerAnswers reports whether a Docker engine answers within a second.
func dockerAnswers(ctx context.Context) bool {
	host := os.Getenv("DOCKER_HOST")
	if host == "" {
		host = "unix:///var/run/docker.sock"
	}
	u, err := url.Parse(host)
	if err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker/_ping", http.NoBody)
	if err != nil {
		return false
	}
	client := http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			if u.Scheme == "unix" {
				return d.DialContext(ctx, "unix", u.Path)
			}
			return d.DialContext(ctx, "tcp", u.Host)
		},
	}}
	answer, err := client.Do(request)
	if err != nil {
		return false
	}
	defer answer.Body.Close()
	return answer.StatusCode == http.StatusOK
}
