package outbox

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5/pgtype"
)

// The hot path of the relay: rows as they come from the hot table, and where they lie as it is sent back, without what pgx and
// sqlc would allocate in between.

// hotRows reads rows into memory that the next call uses again. Texts that are those of the row before are not made anew.
type hotRows struct {
	rows    []row
	headers string // of the last row, as they were read
}

// read replaces the rows by the answer to a question.
func (h *hotRows) read(ctx context.Context, l *postgresLink, sql string, args ...any) error {
	clear(h.rows)
	h.rows = h.rows[:0]
	answer, err := l.schema.On(l.conn).Query(ctx, sql, args...)
	if err != nil {
		return err
	}
	defer answer.Close()
	r := row{Record: Record{Message: Message{Channel: l.channel}, Attempt: 1}}
	var id pgtype.UUID
	var key, topic, contentType, headers pgtype.DriverBytes // valid until the next row
	into := []any{&r.place, &r.id, &r.EnqueuedAt, &id, &r.shard, &key, &topic, &contentType, &headers, &r.Payload}
	for answer.Next() {
		r.Payload = nil // what the row before has got must not be written over
		if err := answer.Scan(into...); err != nil {
			return err
		}
		r.ID, r.Position = id.Bytes, r.id
		again(&r.Key, key)
		again(&r.Topic, topic)
		again(&r.ContentType, contentType)
		again(&h.headers, headers)
		r.setHeaders(h.headers)
		h.rows = append(h.rows, r)
	}
	return answer.Err()
}

// again makes text what was read, if it is not already.
func again(text *string, read []byte) {
	if *text != string(read) {
		*text = string(read)
	}
}

// placed are those of the messages that were read from the hot table.
func placed(list []found) []found {
	elsewhere := func(f found) bool { return !f.place.Valid }
	if !slices.ContainsFunc(list, elsewhere) {
		return list
	}
	return slices.DeleteFunc(slices.Clone(list), elsewhere)
}

// Three columns of the same list, as arrays of PostgreSQL.
type (
	places     []found
	positions  []found
	messageIDs []found
)

// nameColumns tells pgx what they are, for the modes in which it does not ask the server.
func nameColumns(m *pgtype.Map) {
	m.RegisterDefaultPgType(places{}, "_tid")
	m.RegisterDefaultPgType(positions{}, "_int8")
	m.RegisterDefaultPgType(messageIDs{}, "_uuid")
}

func (p places) Dimensions() []pgtype.ArrayDimension     { return oneDimension(len(p)) }
func (p positions) Dimensions() []pgtype.ArrayDimension  { return oneDimension(len(p)) }
func (m messageIDs) Dimensions() []pgtype.ArrayDimension { return oneDimension(len(m)) }

func (p places) Index(i int) any     { return &p[i].place }
func (p positions) Index(i int) any  { return (*position)(&p[i].id) }
func (m messageIDs) Index(i int) any { return (*messageID)(&m[i].message) }

func (places) IndexType() any     { return new(pgtype.TID) }
func (positions) IndexType() any  { return new(position) }
func (messageIDs) IndexType() any { return new(messageID) }

func oneDimension(n int) []pgtype.ArrayDimension {
	return []pgtype.ArrayDimension{{Length: int32(n), LowerBound: 1}}
}

type position int64

func (p *position) Int64Value() (pgtype.Int8, error) {
	return pgtype.Int8{Int64: int64(*p), Valid: true}, nil
}

type messageID [16]byte

func (m *messageID) UUIDValue() (pgtype.UUID, error) {
	return pgtype.UUID{Bytes: *m, Valid: true}, nil
}
