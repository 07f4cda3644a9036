package main

import (
	"context"
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/internal/devserver"
)

// ways says which ways to a service there are, and records which were tried, in order.
type ways struct {
	given, programs, noImage, docker, fetchable bool
	tried                                       []string
}

var errStarted = errors.New("started from the programs")

func (h *ways) service() service {
	s := service{
		name: "thing", variable: "DEVSERVICES_TEST_THING", given: []string{"DEVSERVICES_TEST_OTHER"}, image: &image{},
		find: func(want) (string, error) {
			h.tried = append(h.tried, "find")
			if !h.programs {
				return "", &devserver.MissingError{Service: "thing"}
			}
			return "/bin", nil
		},
		start: func(context.Context, want, environment) (*devserver.Server, error) {
			h.tried = append(h.tried, "start")
			return nil, errStarted
		},
	}
	if h.noImage {
		s.image = nil
	}
	return s
}

func (h *ways) want() want {
	return want{sources: sources{
		dockerAnswers: func(context.Context) bool {
			h.tried = append(h.tried, "docker?")
			return h.docker
		},
		runImage: func(context.Context, *image, want) (running, error) {
			h.tried = append(h.tried, "image")
			return running{url: "image"}, nil
		},
		fetch: func(context.Context, service, want) error {
			h.tried = append(h.tried, "fetch")
			h.programs = h.fetchable
			return nil
		},
	}}
}

func TestServicesAreLookedForInOrder(t *testing.T) {
	for _, c := range []struct {
		name string
		ways ways
		want string
	}{
		{"an address", ways{given: true, programs: true, docker: true, fetchable: true}, ""},
		{"programs before Docker", ways{programs: true, docker: true, fetchable: true}, "find find start"},
		{"Docker before packages", ways{docker: true, fetchable: true}, "find docker? image"},
		{"packages where there is no image", ways{noImage: true, docker: true, fetchable: true}, "find find fetch find start"},
		{"packages without Docker", ways{fetchable: true}, "find docker? find fetch find start"},
		{"nothing", ways{}, "find docker? find fetch find"},
	} {
		for _, name := range []string{"DEVSERVICES_TEST_THING", "DEVSERVICES_TEST_OTHER"} {
			t.Setenv(name, "")
		}
		if c.ways.given {
			t.Setenv("DEVSERVICES_TEST_OTHER", "given")
		}
		got, err := c.ways.service().obtain(t.Context(), c.ways.want(), environment{})
		tried := strings.Join(c.ways.tried, " ")
		if tried != c.want {
			t.Errorf("%s: tried %q, want %q", c.name, tried, c.want)
		}
		switch {
		case c.ways.given && (err != nil || got.url != "given"):
			t.Errorf("%s: %q, %v", c.name, got.url, err)
		case strings.HasSuffix(tried, "image") && (err != nil || got.url != "image"):
			t.Errorf("%s: %q, %v", c.name, got.url, err)
		case strings.HasSuffix(tried, "start") != errors.Is(err, errStarted):
			t.Errorf("%s: %v", c.name, err)
		case strings.HasSuffix(tried, "fetch find") && !isMissing(err):
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

func TestParseGivesTheSources(t *testing.T) {
	t.Parallel()
	w, _, err := parse("run", "", nil)
	if err != nil {
		t.Fatal(err)
	}
	if w.dockerAnswers == nil || w.runImage == nil || w.fetch == nil {
		t.Error("a way to get services is missing")
	}
}

// Containers are looked for on loopback, whatever the machine's gateway is.
func TestContainersStayOnLoopback(t *testing.T) {
	t.Setenv("TESTCONTAINERS_HOST_OVERRIDE", "192.0.2.1")
	t.Setenv("TESTCONTAINERS_RYUK_DISABLED", "")
	if err := prepareTestcontainers(); err != nil {
		t.Fatal(err)
	}
	if got := os.Getenv("TESTCONTAINERS_HOST_OVERRIDE"); got != "127.0.0.1" {
		t.Errorf("containers are looked for at %q", got)
	}
	if got := os.Getenv("TESTCONTAINERS_RYUK_DISABLED"); got != "true" {
		t.Errorf("the helper container is disabled: %q", got)
	}
}

func TestVersionOfThePostgresImage(t *testing.T) {
	t.Parallel()
	for version, reference := range map[int]string{0: "postgres:15-alpine", 17: "postgres:17-alpine"} {
		if got := postgresImage.reference(want{postgres: version}); got != reference {
			t.Errorf("version %d: %s, want %s", version, got, reference)
		}
	}
}
