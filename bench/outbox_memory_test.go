package bench

import (
	"context"
	"fmt"
	"runtime"
	"runtime/metrics"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxMemory measures the heap that a relay needs for a backlog.
func BenchmarkOutboxMemory(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 4)
	n, large := sized(5_000, 300_000, 10_000_000), sized(20, 200, 2_000)
	const mebibyte = 1 << 20
	many := heapOf(b, pool, n, payload)
	big := heapOf(b, pool, large, make([]byte, mebibyte))
	r := newReport(b, db, "Outbox: heap of a relay above its idle heap, garbage included",
		fmt.Sprintf("%d messages of %d bytes, then %d messages of 1 MiB; batches of 1000, 2 lanes, GOGC at its default", n, payloadLen, large))
	r.atMost("many messages MiB", many/mebibyte, 64)
	r.atMost("large messages MiB", big/mebibyte, 64)
	r.print()
}

// heapOf returns the greatest heap while a relay publishes a backlog, in bytes above the heap of a relay that waits.
func heapOf(b *testing.B, pool *pgxpool.Pool, n int, payload []byte) float64 {
	emptyOutbox(b, pool)
	s := newSink(n)
	defer startRelay(b, pool, s, outbox.RelayConfig{})()
	balanced(b, pool, 1)
	runtime.GC()
	idle := heapBytes()
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	greatest := make(chan float64, 1)
	go func() { greatest <- watchHeap(ctx) }()
	run(b, pool, insertMessages, n, payload)
	s.wait(b)
	cancel()
	return <-greatest - idle
}

// watchHeap returns the greatest heap until ctx ends.
func watchHeap(ctx context.Context) (greatest float64) {
	ticker := time.NewTicker(2 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return max(greatest, heapBytes())
		case <-ticker.C:
			greatest = max(greatest, heapBytes())
		}
	}
}

// heapBytes is the memory of all objects, those included that the collector has not freed yet.
func heapBytes() float64 {
	sample := []metrics.Sample{{Name: "/memory/classes/heap/objects:bytes"}}
	metrics.Read(sample)
	return float64(sample[0].Value.Uint64())
}
