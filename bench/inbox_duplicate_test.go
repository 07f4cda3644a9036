package bench

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

// BenchmarkInboxDuplicate measures how fast PostgreSQL answers messages that were handled before.
func BenchmarkInboxDuplicate(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, workers)
	box := newInbox(b, pool, "")
	known := make([]string, sized(100, 2_000, 10_000))
	perSecond(b, workers, len(known), func(ctx context.Context, i int) error {
		known[i] = messageID()
		return process(ctx, box, known[i])
	})
	n := sized(500, 40_000, 100_000)
	const again = "Process, delivered before"
	f := interleave(b, rounds(b), contender{again, func(b *testing.B) float64 {
		return perSecond(b, workers, n, func(ctx context.Context, i int) error { return replay(ctx, box, known[i%len(known)]) })
	}})
	r := newReport(b, db, "Inbox: duplicates answered by PostgreSQL",
		fmt.Sprintf("%d duplicates of %d messages per round, %d rounds, %d workers", n, len(known), rounds(b), workers))
	r.figures("msg/s", f)
	r.noted("duplicates/s", f.median(again))
	r.print()
}

func replay(ctx context.Context, box *inbox.Box, message string) error {
	result, err := inbox.Process(ctx, box, inbox.Message{ID: inbox.ID{Consumer: consumer, Message: message}},
		func(context.Context, pgx.Tx) (inbox.Void, error) {
			return inbox.Void{}, fmt.Errorf("message %s runs again", message)
		})
	if err == nil && !result.Replayed {
		err = fmt.Errorf("message %s was not replayed", message)
	}
	return err
}
