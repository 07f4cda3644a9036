package inbox

import (
	"context"
	"encoding/json"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
)

// The statements with the parameters that every mode fills in the same way.

func (s *settings) claim(ctx context.Context, p pipe, m *Message) (claim, error) {
	n, err := db.New(s.schema.On(p)).InboxClaim(ctx, db.InboxClaimParams{
		Consumer: m.ID.Consumer, MessageID: m.ID.Message, Fingerprint: m.Fingerprint, TraceID: optional(m.TraceID),
	})
	if err == nil && n == 0 {
		err = pgx.ErrNoRows
	}
	return claim{attempt: 1}, err
}

func (s *settings) look(ctx context.Context, p pipe, id ID) (db.InboxLookRow, error) {
	return db.New(s.schema.On(p)).InboxLook(ctx, db.InboxLookParams{Consumer: id.Consumer, MessageID: id.Message})
}

func (s *settings) takeover(ctx context.Context, p pipe, m *Message, epoch int64) (claim, error) {
	row, err := db.New(s.schema.On(p)).InboxTakeover(ctx, db.InboxTakeoverParams{
		Consumer: m.ID.Consumer, MessageID: m.ID.Message, Fingerprint: m.Fingerprint,
		Epoch: epoch, MaxAttempts: int32(s.MaxAttempts), IgnoreDue: s.IgnoreDue,
	})
	return claim{attempt: int(row.Attempts), seen: epoch}, err
}

// storeResult returns how many rows took the result: none, if the handler took the claim's row away.
func (s *settings) storeResult(ctx context.Context, p pipe, id ID, result []byte) (int64, error) {
	return db.New(s.schema.On(p)).InboxStoreResult(ctx, db.InboxStoreResultParams{
		Consumer: id.Consumer, MessageID: id.Message, Result: result,
	})
}

// failHere records a failure in the transaction of the claim.
func (s *settings) failHere(ctx context.Context, p pipe, id ID, cause error) (db.InboxFailHereRow, error) {
	return db.New(s.schema.On(p)).InboxFailHere(ctx, db.InboxFailHereParams{
		Consumer: id.Consumer, MessageID: id.Message, LastError: describe(cause), MaxAttempts: s.limitFor(cause),
		BackoffBase: s.BackoffBase.Seconds(), BackoffMax: s.BackoffMax.Seconds(),
	})
}

func (s *settings) recordFailure(ctx context.Context, p pipe, m *Message, epoch int64, cause error) (db.InboxRecordFailureRow, error) {
	payload, headers := m.kept()
	return db.New(s.schema.On(p)).InboxRecordFailure(ctx, db.InboxRecordFailureParams{
		Consumer: m.ID.Consumer, MessageID: m.ID.Message, Fingerprint: m.Fingerprint, TraceID: optional(m.TraceID),
		Epoch: epoch, LastError: describe(cause), MaxAttempts: s.limitFor(cause), Payload: payload, Headers: optional(headers),
		BackoffBase: s.BackoffBase.Seconds(), BackoffMax: s.BackoffMax.Seconds(),
	})
}

func (s *settings) bury(ctx context.Context, p pipe, m *Message, epoch int64) (db.InboxBuryRow, error) {
	payload, headers := m.kept()
	return db.New(s.schema.On(p)).InboxBury(ctx, db.InboxBuryParams{
		Consumer: m.ID.Consumer, MessageID: m.ID.Message, Epoch: epoch, MaxAttempts: int32(s.MaxAttempts),
		Payload: payload, Headers: optional(headers),
	})
}

// payloadKeptMax is the largest payload that a dead row holds. A larger one stays with the broker.
const payloadKeptMax = 16 << 20

// kept returns what a dead row holds of a message.
func (m *Message) kept() (payload []byte, headers string) {
	if m.Payload == nil || len(m.Payload) > payloadKeptMax {
		return nil, ""
	}
	if len(m.Headers) == 0 {
		return m.Payload, ""
	}
	storable := make(map[string]string, len(m.Headers))
	for name, value := range m.Headers {
		storable[check.Clean(name, len(name)*3)] = check.Clean(value, len(value)*3)
	}
	text, err := json.Marshal(storable)
	if err != nil {
		return m.Payload, "" // not reached: strings can always be marshalled
	}
	return m.Payload, string(text)
}
