package bench

import (
	"context"
	"encoding/binary"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// stopwatch measures the time from the answer to COMMIT to the call of Publish. A message's number is in its payload.
type stopwatch struct {
	sink      *sink
	began     time.Time
	committed []atomic.Int64 // nanoseconds since began
	published []atomic.Int64
}

func newStopwatch(n int) *stopwatch {
	return &stopwatch{newSink(n), time.Now(), make([]atomic.Int64, n), make([]atomic.Int64, n)}
}

func (s *stopwatch) Publish(ctx context.Context, batch []outbox.Record) []error {
	now := time.Since(s.began)
	for _, r := range batch {
		s.published[binary.BigEndian.Uint64(r.Payload)].CompareAndSwap(0, int64(now))
	}
	return s.sink.Publish(ctx, batch)
}

// send commits a message in a business transaction of its own.
func (s *stopwatch) send(ctx context.Context, pool *pgxpool.Pool, number int) error {
	m := newMessage()
	m.Payload = slices.Clone(m.Payload)
	binary.BigEndian.PutUint64(m.Payload, uint64(number))
	err := business(pool, func(ctx context.Context, tx pgx.Tx) error {
		_, err := outbox.Enqueue(ctx, tx, m)
		return err
	})(ctx, number)
	s.committed[number].Store(int64(time.Since(s.began)))
	return err
}

// times returns the latencies in milliseconds; 0 where the relay was faster than the answer to COMMIT.
func (s *stopwatch) times(b *testing.B) []float64 {
	b.Helper()
	s.sink.wait(b)
	times := make([]float64, len(s.committed))
	for i := range times {
		times[i] = max(0, milliseconds(time.Duration(s.published[i].Load()-s.committed[i].Load())))
	}
	return times
}

// BenchmarkOutboxLatency measures commit to publish at 1000 messages per second, with default settings.
func BenchmarkOutboxLatency(b *testing.B) {
	db := startDatabase(b)
	const writers, rate = 8, 1000
	pool := db.pool(b, writers)
	seconds := sized(2, 20, 60)
	s := newStopwatch(seconds * rate)
	stop := startRelay(b, pool, s, outbox.RelayConfig{})
	balanced(b, pool, 1)
	start := time.Now()
	pace(b, writers, len(s.committed), writers*time.Second/rate, func(ctx context.Context, i int) error { return s.send(ctx, pool, i) })
	reached := float64(len(s.committed)) / time.Since(start).Seconds()
	times := s.times(b)
	stop()
	r := newReport(b, db, "Outbox: commit to publish at 1000 messages per second",
		fmt.Sprintf("%d messages, %d writers, %.0f messages per second reached, payload and business row of %d bytes, default settings",
			len(times), writers, reached, payloadLen))
	r.atMost("p50 ms", quantile(times, 0.5), 2)
	r.atMost("p99 ms", quantile(times, 0.99), 8)
	r.noted("max ms", slices.Max(times))
	r.print()
}

// pace calls do with 0 to n-1 from a number of writers, each at fixed intervals.
func pace(b *testing.B, writers, n int, interval time.Duration, do func(ctx context.Context, i int) error) {
	b.Helper()
	var group sync.WaitGroup
	for w := range writers {
		group.Go(func() {
			begin := time.Now().Add(interval * time.Duration(w) / time.Duration(writers))
			for k, i := 0, w; i < n; k, i = k+1, i+writers {
				time.Sleep(time.Until(begin.Add(time.Duration(k) * interval)))
				if err := do(b.Context(), i); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	if b.Failed() {
		b.FailNow()
	}
}
