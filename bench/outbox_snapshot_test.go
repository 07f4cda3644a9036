package bench

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/outbox"
)

// BenchmarkOutboxOldSnapshot measures whether rows that vacuum cannot remove, because an old snapshot might see them,
// slow a relay down.
func BenchmarkOutboxOldSnapshot(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, 8)
	const parts = 5
	n := sized(2_000, 100_000, 200_000)
	emptyOutbox(b, pool)
	tx, err := pool.BeginTx(b.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		b.Fatal(err)
	}
	defer tx.Rollback(b.Context())
	if _, err := tx.Exec(b.Context(), "select count(*) from commitbox.outbox_message"); err != nil {
		b.Fatal(err)
	}
	rates := drainParts(b, pool, parts, n)
	f := figures{samples: map[string][]float64{}}
	for i, rate := range rates {
		name := fmt.Sprintf("part %d", i+1)
		f.names = append(f.names, name)
		f.samples[name] = []float64{rate}
	}
	r := newReport(b, db, "Outbox: drain while an old snapshot is held",
		fmt.Sprintf("%d messages in %d parts, one relay at its defaults for all of them, payload %d bytes", parts*n, parts, payloadLen),
		"a REPEATABLE READ transaction is open all the time; each part from its commit to the last Publish",
		"the table was never analysed, as in a new installation: a plan that depends on statistics shows here")
	r.figures("msg/s", f)
	r.atLeast("last part / first part", rates[parts-1]/rates[0], 0.9)
	r.print()
}

// drainParts lets one relay publish the parts one after the other and returns messages per second of each.
func drainParts(b *testing.B, pool *pgxpool.Pool, parts, n int) (rates []float64) {
	s := &changingSink{sink: newSink(0)}
	defer startRelay(b, pool, s, outbox.RelayConfig{})()
	balanced(b, pool, 1)
	for range parts {
		part := newSink(n)
		s.replace(part)
		run(b, pool, insertMessages, n, payload)
		start := time.Now()
		part.wait(b)
		rates = append(rates, float64(n)/time.Since(start).Seconds())
		emptied(b, pool)
	}
	return rates
}

// emptied waits until the relay has deleted what it published.
func emptied(b *testing.B, pool *pgxpool.Pool) {
	b.Helper()
	deadline := time.Now().Add(time.Minute)
	for count(b, pool, "select count(*) from (select 1 from commitbox.outbox_message limit 1) s") > 0 {
		if time.Now().After(deadline) {
			b.Fatal("published messages were not deleted")
		}
		time.Sleep(10 * time.Millisecond)
	}
}
