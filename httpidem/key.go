package httpidem

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"strings"

	"github.com/commitbox/commitbox/inbox"
)

// headerKey is the request header.
const headerKey = "Idempotency-Key"

// keyError says to the client what is wrong with a key.
type keyError string

func (e keyError) Error() string { return string(e) }

const (
	errKeyMissing keyError = "This operation needs an Idempotency-Key header."
	errKeyMany    keyError = "There is more than one Idempotency-Key header."
	errKeySyntax  keyError = `The Idempotency-Key must be one string in double quotes, such as "8e03978e-40d5-43e8-bc93-6894a57f9324".`
	errKeyEmpty   keyError = "The Idempotency-Key is empty."
	errKeyLong    keyError = "The Idempotency-Key is too long."
)

// parseKey reads the values of the header: one string of a structured field (RFC 8941, 3.3.3), without parameters, of which
// the draft defines none. What it returns is printable ASCII.
func parseKey(values []string, limit int, unquoted bool) (string, error) {
	switch len(values) {
	case 0:
		return "", errKeyMissing
	case 1:
	default:
		return "", errKeyMany
	}
	text := strings.Trim(values[0], " ")
	if len(text) > 2*limit+2 { // each character may be escaped
		return "", errKeyLong
	}
	key, ok := unquote(text)
	if !ok && unquoted && isToken(text) {
		key, ok = text, true
	}
	switch {
	case text == "", ok && key == "":
		return "", errKeyEmpty
	case !ok:
		return "", errKeySyntax
	case len(key) > limit:
		return "", errKeyLong
	}
	return key, nil
}

// unquote reads a whole sf-string.
func unquote(text string) (key string, ok bool) {
	if len(text) < 2 || text[0] != '"' || text[len(text)-1] != '"' {
		return "", false
	}
	inner := text[1 : len(text)-1]
	var out strings.Builder
	for i := 0; i < len(inner); i++ {
		c := inner[i]
		switch {
		case c == '\\':
			if i++; i == len(inner) || inner[i] != '"' && inner[i] != '\\' {
				return "", false
			}
			c = inner[i]
		case c == '"', c < ' ', c > '~':
			return "", false
		}
		out.WriteByte(c)
	}
	return out.String(), true
}

func isToken(text string) bool {
	for i := range len(text) {
		c := text[i]
		letter := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9'
		if !letter && strings.IndexByte("-_.:~+/=", c) < 0 {
			return false
		}
	}
	return text != ""
}

// service is the first part of the inbox ids.
const service = "http"

// newID makes the inbox id of a key within its scope: readable, or a hash where that is too long. The hash stands under an
// empty scope, which no request has.
func newID(name, scope, key string) (inbox.ID, error) {
	if id, err := inbox.NewID(service, name, scope, key); err == nil {
		return id, nil
	}
	sum := sha256.New()
	writeParts(sum, scope, key)
	return inbox.NewID(service, name, "", "sha256:"+hex.EncodeToString(sum.Sum(nil)))
}

// writeParts writes the parts with their lengths, which keep one from running into the next.
func writeParts(to hash.Hash, parts ...string) {
	for _, part := range parts {
		to.Write(binary.BigEndian.AppendUint64(nil, uint64(len(part))))
		to.Write([]byte(part))
	}
}
