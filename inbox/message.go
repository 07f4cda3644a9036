package inbox

import (
	"bytes"
	"crypto/sha256"
	"errors"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
)

const (
	fingerprintLenMax = 64
	traceIDLenMax     = 64
	fingerprintSHA256 = 1
)

// Message is a delivery that [Process] handles.
type Message struct {
	ID      ID
	Payload []byte            // kept in the row when the message is given up; nil: never kept. Not compared, see Fingerprint
	Headers map[string]string // kept with the payload

	// Delivery is the broker's own count of deliveries, from 1; 0: unknown. It is the second limit beside the recorded
	// attempts, for messages that kill the process before an attempt can be recorded: see Config.MaxDeliveries.
	Delivery int

	// Fingerprint tells two messages with one id apart: one byte for the algorithm, then the hash, 2 to 64 bytes. It is
	// compared with the stored one if both exist and have the same algorithm; nil is never compared. Set it where every
	// copy has the same bytes, as messages of our outbox have; a producer that serialises again on a retry has not.
	Fingerprint []byte

	TraceID string // stored with the row for people who search; at most 64 bytes
}

// FingerprintOf returns the SHA-256 fingerprint of a payload, byte for byte: JSON with its keys in another order is
// another payload. Not promised: who sent it; it is no signature.
func FingerprintOf(payload []byte) []byte {
	sum := sha256.Sum256(payload)
	return append([]byte{fingerprintSHA256}, sum[:]...)
}

func (m *Message) check() error {
	return errors.Join(m.ID.check(), checkFingerprint(m.Fingerprint), check.OptionalText("Message.TraceID", m.TraceID, traceIDLenMax),
		checkDelivery(m.Delivery))
}

func checkDelivery(n int) error {
	if n < 0 {
		return &commitbox.InputError{Field: "Message.Delivery", Problem: "is negative"}
	}
	return nil
}

func checkFingerprint(f []byte) error {
	switch {
	case len(f) == 1:
		return &commitbox.InputError{Field: "Fingerprint", Problem: "has an algorithm byte and no hash"}
	case f != nil && len(f) == 0:
		return &commitbox.InputError{Field: "Fingerprint", Problem: "is empty and not nil"}
	}
	return check.Size("Fingerprint", len(f), fingerprintLenMax)
}

// mismatch says that two fingerprints can be compared and differ.
func mismatch(stored, given []byte) bool {
	return len(stored) > 0 && len(given) > 0 && stored[0] == given[0] && !bytes.Equal(stored, given)
}
