package cache

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"sync"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
)

// A stored entry:
//
//	version   1 byte, 1
//	mac       16 bytes: HMAC-SHA256, cut, of the key's length, the key, the version and all that follows
//	system    8 bytes  ┐
//	timeline  4 bytes  │ the identity of the database, zero in mode cache
//	gen.      8 bytes  ┘
//	finished  8 bytes, microseconds since 1970, as PostgreSQL counts
//	flags     1 byte: 1 there is a fingerprint, 2 there is a result
//	length    1 byte, of the fingerprint
//	the fingerprint, then the result: a codec byte and the value
//
// Integers are big-endian. The key in the MAC keeps an entry from being believed under another key.
const (
	entryVersion = 1
	macLen       = 16
	bodyAt       = 1 + macLen
	headLen      = bodyAt + 8 + 4 + 8 + 8 + 2

	hasFingerprint = 1
	hasResult      = 2
)

// reading is what a look at a stored value found, as the metrics name it.
type reading string

const (
	hit        reading = "hit"
	miss       reading = "miss"
	stale      reading = "stale"      // of another history of the database
	forged     reading = "forged"     // not signed by us, or for another key
	unreadable reading = "unreadable" // no entry at all: wrong type, garbage, cut
	oversized  reading = "oversized"
)

// sealer writes and reads entries.
type sealer struct {
	signers  []*signer // the first one signs
	entryMax int
}

func newSealer(secrets [][]byte, entryMax int) sealer {
	s := sealer{entryMax: entryMax}
	for _, secret := range secrets {
		s.signers = append(s.signers, newSigner(bytes.Clone(secret)))
	}
	return s
}

// seal returns the stored form of an entry.
func (s sealer) seal(key string, of inbox.Identity, e inbox.CacheEntry) ([]byte, error) {
	size := headLen + len(e.Fingerprint) + len(e.Result)
	if len(e.Fingerprint) > 255 {
		return nil, &commitbox.InputError{Field: "CacheEntry.Fingerprint", Problem: "is too long", Size: len(e.Fingerprint), Limit: 255}
	}
	if size > s.entryMax {
		return nil, &commitbox.InputError{Field: "CacheEntry", Problem: "is too large", Size: size, Limit: s.entryMax}
	}
	b := make([]byte, bodyAt, size)
	b[0] = entryVersion
	b = binary.BigEndian.AppendUint64(b, of.System)
	b = binary.BigEndian.AppendUint32(b, of.Timeline)
	b = binary.BigEndian.AppendUint64(b, uint64(of.Generation))
	b = binary.BigEndian.AppendUint64(b, uint64(e.FinishedAt.UnixMicro()))
	b = append(b, flags(e), byte(len(e.Fingerprint)))
	b = append(append(b, e.Fingerprint...), e.Result...)
	copy(b[1:], s.signers[0].mac(key, b))
	return b, nil
}

func flags(e inbox.CacheEntry) (f byte) {
	if e.Fingerprint != nil {
		f |= hasFingerprint
	}
	if e.Result != nil {
		f |= hasResult
	}
	return f
}

// open reads a stored form. Only a hit has an entry, whose slices are parts of stored.
func (s sealer) open(key string, of inbox.Identity, stored []byte) (e inbox.CacheEntry, r reading) {
	switch {
	case len(stored) > s.entryMax:
		return e, oversized
	case len(stored) < headLen || stored[0] != entryVersion:
		return e, unreadable
	case !s.signed(key, stored):
		return e, forged
	}
	body := stored[bodyAt:]
	if found := (inbox.Identity{
		System: binary.BigEndian.Uint64(body), Timeline: binary.BigEndian.Uint32(body[8:]), Generation: int64(binary.BigEndian.Uint64(body[12:])),
	}); found != of {
		return e, stale
	}
	e.FinishedAt = time.UnixMicro(int64(binary.BigEndian.Uint64(body[20:])))
	has, size, rest := body[28], int(body[29]), body[30:]
	if size > len(rest) {
		return inbox.CacheEntry{}, unreadable
	}
	if has&hasFingerprint != 0 {
		e.Fingerprint = rest[:size:size]
	}
	if has&hasResult != 0 {
		e.Result = rest[size:]
	}
	return e, hit
}

// signed tries every secret.
func (s sealer) signed(key string, stored []byte) bool {
	for _, signer := range s.signers {
		if hmac.Equal(stored[1:bodyAt], signer.mac(key, stored)) {
			return true
		}
	}
	return false
}

// signer makes the MACs of one secret. Its hashes are kept, because one costs more to make than to use.
type signer struct{ hashes sync.Pool }

func newSigner(secret []byte) *signer {
	return &signer{sync.Pool{New: func() any { return hmac.New(sha256.New, secret) }}}
}

// mac covers the key, the version and the body.
func (s *signer) mac(key string, stored []byte) []byte {
	h := s.hashes.Get().(hash.Hash)
	defer s.hashes.Put(h)
	h.Reset()
	head := binary.BigEndian.AppendUint32(make([]byte, 0, 4+len(key)+1), uint32(len(key)))
	h.Write(append(append(head, key...), stored[0]))
	h.Write(stored[bodyAt:])
	return h.Sum(nil)[:macLen]
}
