package bench

import (
	"context"
	"maps"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	watermillsql "github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const millTopic = "bench"

// mill is watermill-sql's queue: one table, rows locked and deleted in one transaction that is open while they are
// handled.
type mill struct {
	pool   *pgxpool.Pool
	schema watermillsql.PostgreSQLQueueSchema
}

func newMill(b *testing.B, pool *pgxpool.Pool) *mill {
	b.Helper()
	m := &mill{pool: pool, schema: watermillsql.PostgreSQLQueueSchema{
		SubscribeBatchSize:  readLen,
		GeneratePayloadType: func(string) string { return "bytea" },
	}}
	s := m.subscriber(b)
	if err := s.SubscribeInitialize(millTopic); err != nil {
		b.Fatal(err)
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	return m
}

func (m *mill) subscriber(b *testing.B) *watermillsql.Subscriber {
	b.Helper()
	s, err := watermillsql.NewSubscriber(watermillsql.BeginnerFromPgx(m.pool), watermillsql.SubscriberConfig{
		SchemaAdapter: m.schema, OffsetsAdapter: watermillsql.PostgreSQLQueueOffsetsAdapter{DeleteOnAck: true},
		PollInterval: time.Millisecond,
	}, watermill.NopLogger{})
	if err != nil {
		b.Fatal(err)
	}
	return s
}

func (m *mill) drain(b *testing.B, n int) float64 {
	m.empty(b)
	run(b, m.pool, `insert into watermill_bench (uuid, payload, metadata)
		select gen_random_uuid(), $2, json_build_object('source', 'bench', 'key', 'order-' || n % 10000, 'content_type', 'application/json')
		  from generate_series(1, $1::integer) n`, n, payload)
	settle(b, m.pool, "watermill_bench")
	start := time.Now()
	s := m.subscriber(b)
	messages, err := s.Subscribe(b.Context(), millTopic)
	if err != nil {
		b.Fatal(err)
	}
	for range n {
		(<-messages).Ack()
	}
	if err := s.Close(); err != nil {
		b.Fatal(err)
	}
	took := time.Since(start)
	if left := count(b, m.pool, "select count(*) from watermill_bench"); left != 0 {
		b.Fatalf("watermill-sql left %d of %d messages", left, n)
	}
	return float64(n) / took.Seconds()
}

func (m *mill) empty(b *testing.B) { run(b, m.pool, "truncate watermill_bench") }

// publish stores a message in a business transaction; the topic is the table, and what it has no column for is metadata.
func (m *mill) publish(_ context.Context, tx pgx.Tx) error {
	p, err := watermillsql.NewPublisher(watermillsql.TxFromPgx(tx), watermillsql.PublisherConfig{SchemaAdapter: m.schema}, watermill.NopLogger{})
	if err != nil {
		return err
	}
	sent := newMessage()
	announced := message.NewMessage(watermill.NewUUID(), sent.Payload)
	announced.Metadata = message.Metadata{"key": sent.Key, "content_type": sent.ContentType}
	maps.Copy(announced.Metadata, sent.Headers)
	return p.Publish(millTopic, announced)
}
