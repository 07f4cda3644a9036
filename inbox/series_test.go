package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// series is an observer that keeps each metric under each set of labels, as a metrics store does.
type series struct {
	mu  sync.Mutex
	sum map[string]float64
}

func (s *series) Observe(m *commitbox.Metric, value float64, labels ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sum[m.Name+" "+strings.Join(labels, " ")] += value
}

// A hostile producer sends ids, texts and payloads that never repeat, and somebody else writes to Redis: the number of series
// stays small. The ratios of hits and of duplicates can be read from them.
func TestB84_A10_WhatIsMeasuredDoesNotGrowWithWhatIsSent(t *testing.T) {
	w := newWorld(t)
	seen := &series{sum: map[string]float64{}}
	observed := func(c *cache.Config) { c.Observer = seen }
	g := guard(w, newFront(t, testenv.Redis(t), observed), inbox.ModeDouble)
	box := w.box(inbox.Config{Policies: g.policies, Cache: g.front, Guard: g.front, Observer: seen, MaxAttempts: 2})
	const n = 400
	for i := range n {
		text := fmt.Sprintf("%d\n\xff{}\"' %s", i, strings.Repeat("é", i%200))
		m := inbox.Message{ID: id(strings.ToValidUTF8(text, "?")), Payload: []byte(text), Fingerprint: inbox.FingerprintOf([]byte(text)), TraceID: fmt.Sprint(i)}
		handler := func(ctx context.Context, tx pgx.Tx) (string, error) {
			if i%4 == 0 {
				return "", errors.New(text)
			}
			return text, nil
		}
		if i%4 == 1 {
			g.front.client.Set(t.Context(), g.front.prefix+":entry:{"+m.ID.Key()+"}", text, time.Minute)
		}
		_, _ = inbox.Process(t.Context(), box, m, handler)
		box.AwaitCopies()
		_, _ = inbox.Process(t.Context(), box, m, handler)
		if i%4 == 2 {
			m.Fingerprint = inbox.FingerprintOf([]byte("another"))
			_, _ = inbox.Process(t.Context(), box, m, handler)
		}
	}
	if len(seen.sum) > 30 {
		t.Errorf("%d series: %v", len(seen.sum), seen.sum)
	}
	for name, want := range map[string]float64{
		"commitbox_inbox_handled c executed table": n * 3 / 4,
		"commitbox_inbox_handled c replayed cache": n * 3 / 4,
		"commitbox_inbox_handled c failed table":   n / 4,
		"commitbox_inbox_handled c not_due table":  n / 4,
		"commitbox_inbox_handled c mismatch table": n / 4,
		"commitbox_cache_lookups c hit":            n, // a mismatch is found there and confirmed by the table
		"commitbox_cache_lookups c miss":           n,
		"commitbox_cache_lookups c unreadable":     n / 4,
	} {
		if got := seen.sum[name]; got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
	for _, name := range []string{"commitbox_cache_seconds get", "commitbox_cache_seconds put", "commitbox_inbox_seconds c executed", "commitbox_inbox_seconds c replayed"} {
		if seen.sum[name] <= 0 {
			t.Errorf("%s is not measured", name)
		}
	}
}
