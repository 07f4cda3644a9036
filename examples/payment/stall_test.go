package main

import (
	"context"
	"errors"
	"testing"

	"github.com/commitbox/commitbox/outbox"
)

func TestStalledRelayIsReplaced(t *testing.T) {
	t.Parallel()
	other := errors.New("x")
	for name, c := range map[string]struct {
		ends []error // of one relay after the other
		stop bool    // the shop is stopped meanwhile
		runs int
		want error
	}{
		"stalls, then stops": {ends: []error{outbox.ErrPublishStalled, outbox.ErrPublishStalled, nil}, runs: 3},
		"fails":              {ends: []error{outbox.ErrPublishStalled, other}, runs: 2, want: other},
		"always stalls":      {ends: []error{outbox.ErrPublishStalled}, runs: stallsMax + 1, want: outbox.ErrPublishStalled},
		"stalls at the end":  {ends: []error{outbox.ErrPublishStalled}, stop: true, runs: 1},
	} {
		ctx, stop := context.WithCancel(t.Context())
		if c.stop {
			stop()
		}
		runs := 0
		err := keepRelaying(ctx, func(context.Context) error {
			runs++
			return c.ends[min(runs, len(c.ends))-1]
		})
		stop()
		if runs != c.runs || !errors.Is(err, c.want) || (err == nil) != (c.want == nil) {
			t.Errorf("%s: %d relays, then %v", name, runs, err)
		}
	}
}
