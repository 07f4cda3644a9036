package main

import (
	"bytes"
	"context"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestIdempotentHTTP(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), testenv.EmptyDatabase(t).URL, "", &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{"4 orders and 4 messages", "1 ran", "201 replayed", "422", "403", "429"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the output has no %q:\n%s", want, &out)
		}
	}
	t.Logf("\n%s", &out)
}

// TestWhatWasDoneTwiceShows breaks the count by hand.
func TestWhatWasDoneTwiceShows(t *testing.T) {
	t.Parallel()
	db, err := exampledb.Create(t.Context(), testenv.EmptyDatabase(t).URL, tables)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Drop(); err != nil {
			t.Error(err)
		}
	})
	var out bytes.Buffer
	if err := newStory("", db.Pool, &out).count(t.Context()); err == nil {
		t.Errorf("missing orders are not seen: %s", &out)
	}
}

func TestListenUntilTheEnd(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancelled := writerFunc(func(p []byte) (int, error) {
		cancel()
		return len(p), nil
	})
	if err := run(ctx, testenv.EmptyDatabase(t).URL, "127.0.0.1:0", cancelled); err != nil {
		t.Error(err)
	}
	if err := run(t.Context(), "nonsense", "", cancelled); err == nil || !strings.Contains(err.Error(), "DATABASE_URL") {
		t.Errorf("a bad address is %v", err)
	}
}

type writerFunc func(p []byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
