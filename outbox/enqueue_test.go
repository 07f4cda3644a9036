package outbox_test

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

func begin(t *testing.T, db *testenv.DB) pgx.Tx {
	t.Helper()
	tx, err := db.Pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	return tx
}

func TestP14_BadMessagesAreRefusedBeforeTheDatabaseSeesThem(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	tx := begin(t, db)
	long := func(n int) string { return strings.Repeat("x", n) }
	with := func(change func(*outbox.Message)) outbox.Message {
		m := message("k", "p")
		change(&m)
		return m
	}
	for field, m := range map[string]outbox.Message{
		"Message.Channel":       with(func(m *outbox.Message) { m.Channel = long(64) }),
		"Message.Topic":         with(func(m *outbox.Message) { m.Topic = "" }),
		"Message.Topic ":        with(func(m *outbox.Message) { m.Topic = long(256) }),
		"Message.Topic  ":       with(func(m *outbox.Message) { m.Topic = "a\x00b" }),
		"Message.Key":           with(func(m *outbox.Message) { m.Key = long(513) }),
		"Message.Key ":          with(func(m *outbox.Message) { m.Key = "\xff" }),
		"Message.ContentType":   with(func(m *outbox.Message) { m.ContentType = long(256) }),
		"Message.Payload":       with(func(m *outbox.Message) { m.Payload = make([]byte, 1<<20+1) }),
		"Message.Headers":       with(func(m *outbox.Message) { m.Headers = map[string]string{"a": long(60_000), "b": long(6_000)} }),
		"Message.Headers name":  with(func(m *outbox.Message) { m.Headers = map[string]string{"": "x"} }),
		"Message.Headers value": with(func(m *outbox.Message) { m.Headers = map[string]string{"a": "\x00"} }),
	} {
		field = strings.TrimSpace(field)
		_, err := outbox.Enqueue(t.Context(), tx, m)
		var input *commitbox.InputError
		if !errors.As(err, &input) || input.Field != field {
			t.Errorf("%s: %v", field, err)
		}
		if strings.Contains(err.Error(), "too") && (input.Limit == 0 || input.Size <= input.Limit) {
			t.Errorf("%s: size %d and limit %d are not told", field, input.Size, input.Limit)
		}
	}
	_, err := outbox.Enqueue(t.Context(), tx, message("k", "good"), outbox.Message{Payload: []byte("x")})
	if input := (*commitbox.InputError)(nil); !errors.As(err, &input) || input.Field != "messages[1].Topic" {
		t.Errorf("second message without topic: %v", err)
	}
	if _, err := outbox.Enqueue(t.Context(), nil, message("k", "p")); !errors.As(err, new(*commitbox.InputError)) {
		t.Errorf("nil transaction: %v", err)
	}
	// The transaction is as usable as before, and holds only what follows.
	if _, err := outbox.Enqueue(t.Context(), tx, message("k", "kept")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_message"); n != 1 {
		t.Errorf("%d messages stored, want 1", n)
	}
	if _, err := outbox.Enqueue(t.Context(), tx, message("k", "late")); !errors.As(err, new(*commitbox.InputError)) || !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("ended transaction: %v", err)
	}
}

func TestP14_ATransactionThatCannotTakeAStatementIsRefused(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	ctx := t.Context()
	for name, spoil := range map[string]func(pgx.Tx) error{
		"has ended": func(tx pgx.Tx) error { _, err := tx.Exec(ctx, "commit"); return err },
		"is aborted": func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "select 1/0")
			if err == nil {
				return errors.New("no error")
			}
			return nil
		},
		"has rows open":           func(tx pgx.Tx) error { _, err := tx.Query(ctx, "select 1"); return err },
		"has lost its connection": func(tx pgx.Tx) error { return tx.Conn().Close(ctx) },
	} {
		tx := begin(t, db)
		must(t, spoil(tx))
		_, err := outbox.Enqueue(ctx, tx, message("k", "p"))
		if input := (*commitbox.InputError)(nil); !errors.As(err, &input) || input.Field != "tx" || !strings.HasPrefix(input.Problem, name) {
			t.Errorf("%s: %v", name, err)
		}
		_ = tx.Conn().Close(context.Background())
	}
	if n := count(t, db, "select count(*) from commitbox.outbox_message"); n != 0 {
		t.Errorf("%d messages were stored", n)
	}
}

func TestEnqueueAtTheLimits(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	m := outbox.Message{
		Channel: strings.Repeat("c", 63), Topic: strings.Repeat("ü", 127), Key: strings.Repeat("k", 512),
		ContentType: strings.Repeat("t", 255), Payload: make([]byte, 1<<20), Headers: map[string]string{"h": strings.Repeat("v", 64<<10-1)},
	}
	enqueue(t, db, m)
	box, err := outbox.New(outbox.Config{PayloadMax: 2 << 20, HeadersMax: 100 << 10})
	if err != nil {
		t.Fatal(err)
	}
	m.Payload, m.Headers["h"] = make([]byte, 2<<20), strings.Repeat("v", 100<<10-1)
	tx := begin(t, db)
	if _, err := box.Enqueue(t.Context(), tx, m); err != nil {
		t.Errorf("raised limits: %v", err)
	}
}

func TestEnqueueKeepsIDsAndMakesMissingOnes(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	given := uuid.New()
	m := message("k", "1")
	m.ID = given
	ids := enqueue(t, db, m, message("k", "2"))
	if ids[0] != given || ids[1] == uuid.Nil || ids[1].Version() != 7 {
		t.Errorf("ids %v", ids)
	}
	if ids := enqueue(t, db); ids != nil {
		t.Errorf("no messages: ids %v", ids)
	}
}

func TestB23_ManyMessagesOfOneTransactionKeepTheirOrder(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var batch []outbox.Message
	var want []string
	for i := range 250 {
		payload := strings.Repeat("x", i%3) + string(rune('A'+i%26))
		batch = append(batch, message("k", payload))
		want = append(want, payload)
	}
	enqueue(t, db, batch...)
	p := &recorder{}
	cfg := brisk()
	cfg.Batch = 100
	start(t, newRelay(t, db.Pool, p, cfg))
	eventually(t, "250 messages", func() bool { return len(p.payloads()) >= 250 })
	if diff := cmp.Diff(want, p.payloads("k")); diff != "" {
		t.Error(diff)
	}
}

func TestP1_B80_AMessageGoesWithItsSavepoint(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	ctx := t.Context()
	outer := begin(t, db)
	inner, err := outer.Begin(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := outbox.Enqueue(ctx, inner, message("k", "undone")); err != nil {
		t.Fatal(err)
	}
	if err := inner.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := outbox.Enqueue(ctx, outer, message("k", "kept")); err != nil {
		t.Fatal(err)
	}
	if err := outer.Commit(ctx); err != nil {
		t.Fatal(err)
	}
	gone := begin(t, db)
	if _, err := outbox.Enqueue(ctx, gone, message("k", "rolled back")); err != nil {
		t.Fatal(err)
	}
	if err := gone.Rollback(ctx); err != nil {
		t.Fatal(err)
	}
	p := &recorder{}
	relay := newRelay(t, db.Pool, p, brisk())
	defer relay.Close()
	for range 3 {
		if _, err := relay.RunOnce(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff([]string{"kept"}, p.payloads()); diff != "" {
		t.Error(diff)
	}
}

func TestB75_B76_PayloadsReachThePublisherByteForByte(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	want := []string{`{"b":1e2,"aa":1.10,"b":2}`, "1e400 ", "12345678901234567890", `"\u0000"`, "\x00", "\xff\xfe", `"\ud800"`, "", strings.Repeat("\x00\xff", 1000)}
	for _, payload := range want {
		enqueue(t, db, message("k", payload))
	}
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	eventually(t, "all payloads", func() bool { return len(p.payloads()) >= len(want) })
	if diff := cmp.Diff(want, p.payloads("k")); diff != "" {
		t.Error(diff)
	}
}

// One message alone takes a statement of its own: it is stored as it is among others, in every mode of pgx.
func TestOneMessageIsStoredLikeMany(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	full := outbox.Message{
		Channel: "c", Topic: "tö", Key: "k'\\", ContentType: "a/b", Payload: []byte("\x00\xff\\x41"),
		Headers: map[string]string{"a": "<&>\u2028\"\\", "é": "\x01"},
	}
	const stored = "select jsonb_agg(to_jsonb(m) - 'id' - 'created_at' - 'message_id' - 'shard' order by m.id) from commitbox.outbox_message m where topic = $1"
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		cfg := db.Pool.Config()
		cfg.ConnConfig.DefaultQueryExecMode = mode
		pool, err := pgxpool.NewWithConfig(t.Context(), cfg)
		must(t, err)
		for _, m := range []outbox.Message{full, {Topic: "bare"}, {Topic: "empty", Payload: []byte{}, Headers: map[string]string{}}} {
			must(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				if _, err := outbox.Enqueue(t.Context(), tx, m); err != nil {
					return err
				}
				if _, err := outbox.Enqueue(t.Context(), tx, m, m); err != nil {
					return err
				}
				var rows []map[string]any
				if err := tx.QueryRow(t.Context(), stored, m.Topic).Scan(&rows); err != nil {
					return err
				}
				if diff := cmp.Diff([]map[string]any{rows[1], rows[2]}, []map[string]any{rows[0], rows[0]}); diff != "" {
					t.Errorf("%v, topic %s (-many +one):\n%s", mode, m.Topic, diff)
				}
				_, err := tx.Exec(t.Context(), "delete from commitbox.outbox_message")
				return err
			}))
		}
		pool.Close()
	}
}
