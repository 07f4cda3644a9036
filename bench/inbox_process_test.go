package bench

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
)

const workers = 32

// consumer is the inbox's name in all families.
const consumer = "bench"

// messageID is a new id as a producer of ours would have made it.
func messageID() string { return uuid.Must(uuid.NewV7()).String() }

func newInbox(b *testing.B, pool *pgxpool.Pool, schema string) *inbox.Box {
	b.Helper()
	box, err := inbox.New(pool, inbox.Config{Schema: schema})
	if err != nil {
		b.Fatal(err)
	}
	return box
}

// process handles one message with a business insert, without a result.
func process(ctx context.Context, box *inbox.Box, message string) error {
	_, err := inbox.Process(ctx, box, inbox.Message{ID: inbox.ID{Consumer: consumer, Message: message}},
		func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) { return inbox.Void{}, changeBusiness(ctx, tx) })
	return err
}

// BenchmarkInboxProcess compares Process with the same transaction written by hand, with none of it, and with what is
// usually written.
func BenchmarkInboxProcess(b *testing.B) {
	db := startDatabase(b)
	pool := db.pool(b, workers)
	box := newInbox(b, pool, "")
	n := sized(200, 3_000, 10_000)
	throughput := func(name string, do func(ctx context.Context, message string) error) contender {
		return contender{name, func(b *testing.B) float64 {
			run(b, pool, "truncate public.business, commitbox.inbox, commitbox.inbox_step, peer.inbox, peer.inbox_step")
			rate := perSecond(b, workers, n, func(ctx context.Context, _ int) error { return do(ctx, messageID()) })
			if got := count(b, pool, "select count(*) from public.business"); got != n {
				b.Fatalf("%s: %d business rows after %d messages", name, got, n)
			}
			return rate
		}}
	}
	const ours, raw, none, usual = "Process", "raw insert", "no dedup", "usual way"
	f := interleave(b, turns(b),
		throughput(ours, func(ctx context.Context, message string) error { return process(ctx, box, message) }),
		throughput(raw, func(ctx context.Context, message string) error { return pipelinedInsert(ctx, pool, message) }),
		throughput(none, func(ctx context.Context, _ string) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return changeBusiness(ctx, tx) })
		}),
		throughput(usual, func(ctx context.Context, message string) error { return usualWay(ctx, pool, message) }),
	)
	r := newReport(b, db, "Inbox: one message per transaction, no result",
		fmt.Sprintf("%d messages per round, %d rounds, %d workers, business row of %d bytes, UUIDv7 ids", n, turns(b), workers, payloadLen),
		"raw insert: begin and the insert of the dedup row in one round trip, business insert, commit; same table and indexes",
		"usual way: begin, select, insert pending, business insert, update, commit; same table and indexes")
	r.figures("tx/s", f)
	r.atLeast("Process / raw insert", f.ratio(ours, raw), 0.92)
	r.atLeast("Process / no dedup", f.ratio(ours, none), 0.75)
	r.atLeast("Process / usual way", f.ratio(ours, usual), 1.3)
	r.print()
}

const insertCompleted = `insert into peer.inbox (consumer, message_id, status, attempts, finished_at)
	values ($1::text, $2::text, 'completed', 1, clock_timestamp())`

// pipelinedInsert is the least that a transaction with a dedup row can do.
func pipelinedInsert(ctx context.Context, pool *pgxpool.Pool, message string) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	batch := new(pgx.Batch)
	batch.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	batch.Queue(insertCompleted, consumer, message)
	results := conn.SendBatch(ctx, batch)
	tx := results.Tx()
	if err := results.Close(); err != nil {
		return err
	}
	if err := changeBusiness(ctx, tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

const (
	selectStatus  = `select status from peer.inbox where consumer = $1 and message_id = $2`
	insertPending = `insert into peer.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until)
		values ($1::text, $2::text, 'pending', 1, 1, gen_random_uuid(), now() + interval '30 seconds')`
	updateCompleted = `update peer.inbox set status = 'completed', finished_at = now(), lease_token = null, lease_until = null
		where consumer = $1 and message_id = $2`
)

// usualWay is what is written by hand in many services.
func usualWay(ctx context.Context, pool *pgxpool.Pool, message string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var status string
		err := tx.QueryRow(ctx, selectStatus, consumer, message).Scan(&status)
		if err == nil {
			return fmt.Errorf("message %s is %s already", message, status)
		}
		if !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
		if _, err := tx.Exec(ctx, insertPending, consumer, message); err != nil {
			return err
		}
		if err := changeBusiness(ctx, tx); err != nil {
			return err
		}
		_, err = tx.Exec(ctx, updateCompleted, consumer, message)
		return err
	})
}
