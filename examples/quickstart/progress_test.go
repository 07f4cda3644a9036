package main

import (
	"bytes"
	"errors"
	"testing"
)

func TestProgressEndsWithWhatTheTablesSay(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	p := showProgress(&out, 1000, newTally(), func() (int, error) { return 1000, nil })
	p.stop()
	if got, want := out.String(), "1000 of 1000 orders paid, 0 messages delivered, 0 deliveries received\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	p.paid = func() (int, error) { return 0, errors.New("away") }
	if got, want := p.line(), "1000 of 1000 orders paid, 0 messages delivered, 0 deliveries received"; got != want {
		t.Errorf("without an answer: %q, want %q", got, want)
	}
}
