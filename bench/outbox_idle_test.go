package bench

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxIdle measures what a relay without work costs, and how late it notices the first message.
func BenchmarkOutboxIdle(b *testing.B) {
	db := startDatabase(b)
	var wire testenv.WireCounter
	counted := db.pool(b, 4, func(cfg *pgxpool.Config) { wire.Attach(cfg.ConnConfig) })
	pool := db.pool(b, 4)
	asleep, firsts := sized(time.Second, 10*time.Second, time.Minute), sized(2, 15, 60)
	s := newStopwatch(firsts)
	stop := startRelay(b, counted, s, outbox.RelayConfig{})
	balanced(b, pool, 1)
	time.Sleep(quiet)
	before := processorTime(b)
	sent := wire.Measure(func() { time.Sleep(asleep) })
	used := processorTime(b) - before
	for i := range firsts {
		time.Sleep(quiet + time.Duration(i)*7*time.Millisecond)
		if err := s.send(b.Context(), pool, i); err != nil {
			b.Fatal(err)
		}
	}
	times := s.times(b)
	stop()
	r := newReport(b, db, "Outbox: an idle relay",
		fmt.Sprintf("default settings, watched for %v; then %d messages, each after %v without any", asleep, firsts, quiet))
	r.atMost("statements/s", float64(sent.Statements)/asleep.Seconds(), 20)
	r.atMost("% of a core", 100*used.Seconds()/asleep.Seconds(), 1)
	r.atMost("first message max ms", slices.Max(times), 120)
	r.noted("first message p50 ms", quantile(times, 0.5))
	r.print()
}

// quiet is how long a relay needs to come to rest, with room to spare: a second without messages, then doubling waits.
const quiet = 1500 * time.Millisecond

// processorTime is what this process has used so far.
func processorTime(b *testing.B) time.Duration {
	b.Helper()
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		b.Fatal(err)
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}
