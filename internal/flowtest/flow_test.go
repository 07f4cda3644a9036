package flowtest_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// installation is the library as one program uses it. The business table effects has no unique key, so that a second
// effect shows.
type installation struct {
	pool   *pgxpool.Pool // what the program uses
	schema string
	outbox *outbox.Box
	inbox  *inbox.Box
}

const business = "create table public.effects (id text not null, value bytea)"

func install(t *testing.T, pool *pgxpool.Pool, schema string) *installation {
	t.Helper()
	out, err := outbox.New(outbox.Config{Schema: schema})
	if err != nil {
		t.Fatal(err)
	}
	in, err := inbox.New(pool, inbox.Config{Schema: schema, BackoffBase: time.Nanosecond, BackoffMax: time.Nanosecond})
	if err != nil {
		t.Fatal(err)
	}
	return &installation{pool, schema, out, in}
}

// connect returns a pool of the database in the given mode.
func connect(t *testing.T, url string, mode pgx.QueryExecMode) *pgxpool.Pool {
	t.Helper()
	cfg, err := pgxpool.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.DefaultQueryExecMode = mode
	cfg.MaxConns = 4
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// The messages hold what the ways of sending a parameter may change.
var messages = []outbox.Message{
	{Topic: "t", Key: "k", Payload: []byte("{\"b\":1e2,\"b\":1.10}  \x00\xff\\x27'")},
	{Topic: "t", Key: "k", ContentType: "text/plain", Headers: map[string]string{"a": `"'\ü`, "b": ""}, Payload: []byte{}},
	{Topic: "ü.'\"", Key: `k'2"\`, Payload: []byte("plain")},
	{Topic: "t", Payload: []byte("without a key")},
}

func (i *installation) enqueue(t *testing.T, list []outbox.Message) []outbox.Message {
	t.Helper()
	sent := append([]outbox.Message{}, list...)
	err := pgx.BeginFunc(t.Context(), i.pool, func(tx pgx.Tx) error {
		ids, err := i.outbox.Enqueue(t.Context(), tx, list...)
		for j, id := range ids {
			sent[j].ID, sent[j].Channel = id, outbox.DefaultChannel
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return sent
}

// keeper is a publisher that keeps what it gets.
type keeper struct {
	mu   sync.Mutex
	kept []outbox.Message
	fail error
}

func (k *keeper) publish(_ context.Context, r outbox.Record) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.fail != nil {
		return k.fail
	}
	k.kept = append(k.kept, r.Message)
	return nil
}

func (k *keeper) messages() []outbox.Message {
	k.mu.Lock()
	defer k.mu.Unlock()
	return append([]outbox.Message{}, k.kept...)
}

func (i *installation) relay(t *testing.T, k *keeper) *outbox.Relay {
	t.Helper()
	relay, err := outbox.NewRelay(i.pool, outbox.PublishFunc(k.publish), outbox.RelayConfig{Schema: i.schema})
	if err != nil {
		t.Fatal(err)
	}
	return relay
}

// relayUntil calls RunOnce until ok, and Close.
func (i *installation) relayUntil(t *testing.T, k *keeper, what string, ok func() bool) {
	t.Helper()
	relay := i.relay(t, k)
	defer func() {
		if err := relay.Close(); err != nil {
			t.Errorf("close the relay: %v", err)
		}
	}()
	eventually(t, what, func() bool {
		if _, err := relay.RunOnce(t.Context()); err != nil {
			t.Fatalf("relay: %v", err)
		}
		return ok()
	})
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("waited 30 s for: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// checkFlow sends messages all the way, delivers each twice to each way of handling, and counts effects.
func (i *installation) checkFlow(t *testing.T, direct *testenv.DB) {
	t.Helper()
	k := new(keeper)
	sent := i.enqueue(t, messages)
	i.relayUntil(t, k, "all messages", func() bool { return len(k.messages()) >= len(sent) })
	order := cmpopts.SortSlices(func(a, b outbox.Message) bool { return a.ID.String() < b.ID.String() })
	if diff := cmp.Diff(sent, k.messages(), order); diff != "" {
		t.Errorf("published (-enqueued +published):\n%s", diff)
	}
	for _, m := range k.messages() {
		i.checkProcess(t, m)
		i.checkHandle(t, m)
		i.checkFailure(t, m)
	}
	effects := count(t, direct, "select count(*) from public.effects")
	distinct := count(t, direct, "select count(distinct id) from public.effects")
	if want := 3 * len(sent); effects != want || distinct != want {
		t.Errorf("%d effects of %d deliveries, want %d of each", effects, distinct, want)
	}
}

func count(t *testing.T, db *testenv.DB, sql string, args ...any) (n int) {
	t.Helper()
	if err := db.Pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// effect is the business write. The parameters are typed in the statement, because a mode may not ask the server.
func effect(ctx context.Context, tx pgx.Tx, id string, value []byte) error {
	_, err := tx.Exec(ctx, "insert into public.effects values ($1::text, $2::bytea)", id, value)
	return err
}

// answer is a typed result, with what a mode may change.
type answer struct {
	Text  string
	Bytes []byte
}

func (i *installation) checkProcess(t *testing.T, m outbox.Message) {
	t.Helper()
	want := answer{"ü'\\", m.Payload}
	msg := inbox.Message{
		ID: inbox.ID{Consumer: "process", Message: m.ID.String()}, Payload: m.Payload, Headers: m.Headers,
		Fingerprint: inbox.FingerprintOf(m.Payload), TraceID: "trace",
	}
	for _, replayed := range []bool{false, true} {
		res, err := inbox.Process(t.Context(), i.inbox, msg, func(ctx context.Context, tx pgx.Tx) (answer, error) {
			return want, effect(ctx, tx, "process "+m.ID.String(), m.Payload)
		})
		if err != nil || res.Replayed != replayed || !cmp.Equal(res.Value, want, cmpopts.EquateEmpty()) {
			t.Errorf("Process: %+v, %v; want replayed %v", res, err, replayed)
		}
	}
}

func (i *installation) checkHandle(t *testing.T, m outbox.Message) {
	t.Helper()
	id := inbox.ID{Consumer: "handle", Message: m.ID.String()}
	for _, replayed := range []bool{false, true} {
		err := pgx.BeginFunc(t.Context(), i.pool, func(tx pgx.Tx) error {
			res, err := inbox.Handle(t.Context(), tx, id, func(ctx context.Context) (string, error) {
				return "done", effect(ctx, tx, "handle "+m.ID.String(), m.Payload)
			}, inbox.Using(i.inbox), inbox.WithFingerprint(inbox.FingerprintOf(m.Payload)))
			if err == nil && (res.Replayed != replayed || res.Value != "done") {
				t.Errorf("Handle: %+v, want replayed %v", res, replayed)
			}
			return err
		})
		if err != nil {
			t.Errorf("Handle: %v", err)
		}
	}
}

// checkFailure lets a handler fail once: the partial effect is undone, the failure recorded, and the next run counts.
func (i *installation) checkFailure(t *testing.T, m outbox.Message) {
	t.Helper()
	msg := inbox.Message{ID: inbox.ID{Consumer: "failure", Message: m.ID.String()}, Payload: m.Payload}
	broken := errors.New("broken \x00 ü")
	for attempt, cause := range []error{broken, nil} {
		res, err := inbox.Process(t.Context(), i.inbox, msg, func(ctx context.Context, tx pgx.Tx) (struct{}, error) {
			if err := effect(ctx, tx, "failure "+m.ID.String(), m.Payload); err != nil {
				return struct{}{}, err
			}
			return struct{}{}, cause
		})
		if !errors.Is(err, cause) || res.Attempt != attempt+1 {
			t.Errorf("Process, attempt %d: %+v, %v", attempt+1, res, fmt.Sprint(err))
		}
	}
}
