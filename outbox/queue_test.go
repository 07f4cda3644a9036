package outbox_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// The business change and its message take one round trip, and share a fate.
func TestQueueTravelsWithTheBusinessChange(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	exec := func(sql string) {
		t.Helper()
		_, err := db.Pool.Exec(t.Context(), sql)
		must(t, err)
	}
	exec("create table business (n integer primary key)")
	var wire testenv.WireCounter
	cfg := db.Pool.Config()
	wire.Attach(cfg.ConnConfig)
	cfg.MaxConns = 1
	pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
	must(t, err)
	defer pool.Close()
	box, err := outbox.New(outbox.Config{})
	must(t, err)
	send := func(n int, messages ...outbox.Message) (ids []uuid.UUID, err error) {
		batch := new(pgx.Batch)
		batch.Queue("insert into business values ($1)", n)
		ids, err = box.Queue(t.Context(), batch, messages...)
		must(t, err)
		return ids, pool.SendBatch(t.Context(), batch).Close()
	}
	_, err = send(0, message("k", "0")) // prepares the statements
	must(t, err)
	got := wire.Measure(func() { _, err = send(1, message("k", "1")) })
	must(t, err)
	if want := (testenv.Wire{Statements: 2, RoundTrips: 1}); got != want {
		t.Errorf("a batch of a change and a message: %+v, want %+v", got, want)
	}
	ids, err := send(2, message("k", "2"), message("", "3"), outbox.Message{Topic: "later", DeliverAt: time.Now().Add(time.Hour)})
	must(t, err)
	if n := count(t, db, "select count(*) from commitbox.outbox_message where message_id = any($1)", ids); n != 2 {
		t.Errorf("%d of 2 messages are in hot", n)
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_scheduled where message_id = any($1)", ids); n != 1 {
		t.Errorf("%d of 1 message is scheduled", n)
	}

	var refused *pgconn.PgError
	if _, err = send(2, message("k", "refused")); !errors.As(err, &refused) {
		t.Errorf("a change that PostgreSQL refuses: %v", err)
	}
	tx, err := pool.Begin(t.Context())
	must(t, err)
	batch := new(pgx.Batch)
	_, err = outbox.Queue(t.Context(), batch, message("k", "rolled back"))
	must(t, err)
	must(t, tx.SendBatch(t.Context(), batch).Close())
	must(t, tx.Rollback(t.Context()))
	if n := count(t, db, "select count(*) from commitbox.outbox_message"); n != 4 {
		t.Errorf("%d messages are stored, 4 were committed", n)
	}
}

func TestQueueRefusesBadInputAndLeavesTheBatch(t *testing.T) {
	t.Parallel()
	batch := new(pgx.Batch)
	for what, queue := range map[string]func() ([]uuid.UUID, error){
		"a message without a topic": func() ([]uuid.UUID, error) {
			return outbox.Queue(t.Context(), batch, message("k", "1"), outbox.Message{})
		},
		"a key that is too long": func() ([]uuid.UUID, error) {
			return outbox.Queue(t.Context(), batch, outbox.Message{Topic: "t", Key: strings.Repeat("k", 513)})
		},
		"no batch": func() ([]uuid.UUID, error) { return outbox.Queue(t.Context(), nil, message("k", "1")) },
	} {
		ids, err := queue()
		if input := (*commitbox.InputError)(nil); !errors.As(err, &input) || ids != nil || batch.Len() != 0 {
			t.Errorf("%s: %v, %v, and %d statements in the batch", what, ids, err, batch.Len())
		}
	}
	if ids, err := outbox.Queue(t.Context(), batch); ids != nil || err != nil || batch.Len() != 0 {
		t.Errorf("no messages: %v, %v, and %d statements in the batch", ids, err, batch.Len())
	}
}

// What is queued is what Enqueue stores, in every mode of pgx, in another schema and in commit order too.
func TestQueueStoresWhatEnqueueStores(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	full := outbox.Message{Channel: "c", Topic: "t", Key: "k", ContentType: "a/b", Payload: []byte("\x00\xff"), Headers: map[string]string{"a": "b"}}
	const stored = "select jsonb_agg(to_jsonb(m) - 'id' - 'created_at' - 'message_id' order by m.id) from commitbox.outbox_message m"
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		for _, ordered := range []bool{false, true} {
			box, err := outbox.New(outbox.Config{CommitOrder: ordered})
			must(t, err)
			cfg := db.Pool.Config()
			cfg.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
			must(t, err)
			must(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				if _, err := box.Enqueue(t.Context(), tx, full); err != nil {
					return err
				}
				batch := new(pgx.Batch)
				if _, err := box.Queue(t.Context(), batch, full); err != nil {
					return err
				}
				if err := tx.SendBatch(t.Context(), batch).Close(); err != nil {
					return err
				}
				var rows []map[string]any
				if err := tx.QueryRow(t.Context(), stored).Scan(&rows); err != nil {
					return err
				}
				if diff := cmp.Diff(rows[0], rows[1]); len(rows) != 2 || diff != "" {
					t.Errorf("%v, commit order %v (-enqueued +queued):\n%s", mode, ordered, diff)
				}
				_, err := tx.Exec(t.Context(), "delete from commitbox.outbox_message")
				return err
			}))
			pool.Close()
		}
	}
}
