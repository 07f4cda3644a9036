package bench

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/migrate"
)

// BenchmarkInboxSize measures what the number of rows costs: Process in an empty table and in full ones.
func BenchmarkInboxSize(b *testing.B) {
	db := startDatabase(b)
	const callers = 4
	pool := db.pool(b, callers)
	rows, calls := sized(10_000, 1_000_000, 10_000_000), sized(100, 2_000, 5_000)
	random := uuid.NewString
	latency := func(name, schema string, id func() string, rows int) contender {
		if err := migrate.Up(b.Context(), pool, migrate.Config{Schema: schema}); err != nil {
			b.Fatal(err)
		}
		fillInbox(b, pool, schema, id, rows)
		box := newInbox(b, pool, schema)
		return contender{name, func(b *testing.B) float64 { return processMedian(b, box, callers, calls, id) }}
	}
	const empty, ordered, scattered = "empty", "many rows, UUIDv7 ids", "many rows, random ids"
	f := interleave(b, rounds(b),
		latency(empty, "few", messageID, 0),
		latency(ordered, "ordered", messageID, rows),
		latency(scattered, "scattered", random, rows),
	)
	r := newReport(b, db, "Inbox: Process in a large table, p50",
		fmt.Sprintf("%d rows, %d calls per round, %d rounds, %d workers, business row of %d bytes", rows, calls, rounds(b), callers, payloadLen))
	r.figures("ms", f)
	r.atMost("UUIDv7 / empty", f.ratio(ordered, empty), 1.3)
	r.noted("random / empty", f.ratio(scattered, empty))
	r.print()
}

// fillInbox stores completed messages.
func fillInbox(b *testing.B, pool *pgxpool.Pool, schema string, id func() string, rows int) {
	b.Helper()
	columns := []string{"consumer", "message_id", "status", "attempts", "finished_at"}
	_, err := pool.CopyFrom(b.Context(), pgx.Identifier{schema, "inbox"}, columns, pgx.CopyFromSlice(rows, func(int) ([]any, error) {
		return []any{consumer, id(), "completed", 1, time.Now()}, nil
	}))
	if err != nil {
		b.Fatal(err)
	}
	run(b, pool, "vacuum (analyze) "+pgx.Identifier{schema, "inbox"}.Sanitize())
	run(b, pool, "checkpoint")
}

// processMedian returns the median time of a call in milliseconds.
func processMedian(b *testing.B, box *inbox.Box, callers, calls int, id func() string) float64 {
	var mu sync.Mutex
	times := make([]float64, 0, calls)
	perSecond(b, callers, calls, func(ctx context.Context, _ int) error {
		start := time.Now()
		err := process(ctx, box, id())
		took := time.Since(start)
		mu.Lock()
		defer mu.Unlock()
		times = append(times, milliseconds(took))
		return err
	})
	return quantile(times, 0.5)
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
