package optimistic

import (
	"testing"
	"time"
)

func TestWaitDoublesUpToItsLimit(t *testing.T) {
	t.Parallel()
	cfg := RetryConfig{BackoffBase: 10 * time.Millisecond, BackoffMax: 65 * time.Millisecond}
	for n, want := range []int64{10, 20, 40, 65, 65} {
		if got := cfg.wait(n+1, 1).Milliseconds(); got != want {
			t.Errorf("after attempt %d: %d ms, want %d ms", n+1, got, want)
		}
		if got := cfg.wait(n+1, 0); got != 0 {
			t.Errorf("after attempt %d: %v at the least", n+1, got)
		}
	}
	if got := (RetryConfig{}).withDefaults().wait(1<<20, 1); got != time.Second {
		t.Errorf("after very many attempts: %v", got)
	}
}
