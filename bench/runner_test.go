package bench

import (
	"context"
	"os"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// payloadLen is the size of a message's payload and of a business row's, unless a family says otherwise.
const payloadLen = 200

// sized picks the size of a run: BENCH_SMALL, neither, or BENCH_FULL.
func sized[T any](small, normal, full T) T {
	switch {
	case os.Getenv("BENCH_SMALL") != "":
		return small
	case os.Getenv("BENCH_FULL") != "":
		return full
	}
	return normal
}

// rounds is how often every contender of a family runs.
func rounds(b *testing.B) int {
	text := os.Getenv("BENCH_ROUNDS")
	if text == "" {
		return sized(1, 5, 5)
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		b.Fatalf("BENCH_ROUNDS is %q, not a positive number", text)
	}
	return n
}

// turns is the number of rounds of a family whose rounds are short, an odd one: many of them tell more than long ones on a
// machine whose speed changes.
func turns(b *testing.B) int { return 8*rounds(b) + 1 }

// contender is one way to do the work of a family. Its run prepares the work, does it once and returns what was
// measured.
type contender struct {
	name string
	run  func(b *testing.B) float64
}

// figures are the measurements of a family.
type figures struct {
	names   []string
	samples map[string][]float64
}

// interleave runs every contender once per round. Each round begins with another one, so that none is always the first
// after a checkpoint or the last before one.
func interleave(b *testing.B, rounds int, contenders ...contender) figures {
	f := figures{samples: map[string][]float64{}}
	for _, c := range contenders {
		f.names = append(f.names, c.name)
	}
	for round := range rounds {
		for i := range contenders {
			c := contenders[(round+i)%len(contenders)]
			f.samples[c.name] = append(f.samples[c.name], c.run(b))
		}
	}
	return f
}

func (f figures) median(name string) float64 { return quantile(f.samples[name], 0.5) }

// ratio is the median of what the first contender made of the second's in the same round: a machine that becomes slower from
// round to round slows both.
func (f figures) ratio(name, over string) float64 {
	each := make([]float64, len(f.samples[name]))
	for i, sample := range f.samples[name] {
		each[i] = sample / f.samples[over][i]
	}
	return quantile(each, 0.5)
}

// quantile returns the value below which a part q of the samples lies, the nearest rank.
func quantile(samples []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(samples))
	return sorted[min(int(q*float64(len(sorted))), len(sorted)-1)]
}

// perSecond calls do with 0 to n-1 from a number of workers and returns the calls per second. The first error fails the
// benchmark.
func perSecond(b *testing.B, workers, n int, do func(ctx context.Context, i int) error) float64 {
	b.Helper()
	ctx, cancel := context.WithCancelCause(b.Context())
	defer cancel(nil)
	var next atomic.Int64
	var group sync.WaitGroup
	start := time.Now()
	for range workers {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < n && ctx.Err() == nil; i = int(next.Add(1)) - 1 {
				if err := do(ctx, i); err != nil {
					cancel(err)
				}
			}
		})
	}
	group.Wait()
	took := time.Since(start)
	if err := context.Cause(ctx); err != nil {
		b.Fatal(err)
	}
	return float64(n) / took.Seconds()
}
