package outbox

import (
	"encoding/json"
	"fmt"
	"strings"
)

// setHeaders reads a message's headers. What cannot be read makes the row bad, not the batch.
func (r *row) setHeaders(text string) {
	var err error
	r.bad = nil
	if r.Headers, err = headers(text); err != nil {
		r.bad = fmt.Errorf("headers are not an object of strings: %w", err)
	}
}

// headers reads an object of strings in the form in which PostgreSQL writes jsonb. Most have no escapes; they are split
// here, which takes a fifth of the time. Whatever looks different is left to encoding/json.
func headers(text string) (map[string]string, error) {
	if text == "{}" {
		return nil, nil
	}
	if h := plainHeaders(text); h != nil {
		return h, nil
	}
	var h map[string]string
	err := json.Unmarshal([]byte(text), &h)
	return h, err
}

// plainHeaders reads {"name": "value", "name": "value"} without escapes, and returns nil for everything else.
func plainHeaders(text string) map[string]string {
	if len(text) < 2 || text[0] != '{' || strings.IndexByte(text, '\\') >= 0 {
		return nil
	}
	h, rest := make(map[string]string, 4), text[1:]
	for {
		name, after, ok := quoted(rest, `: "`)
		if !ok {
			return nil
		}
		value, after, ok := quoted(after[2:], "")
		if !ok || len(after) == 0 {
			return nil
		}
		h[name] = value
		switch {
		case after == "}":
			return h
		case len(after) > 2 && after[:2] == ", ":
			rest = after[2:]
		default:
			return nil
		}
	}
}

// quoted takes a string in quotation marks off the front; what follows has to begin with then.
func quoted(text, then string) (inside, after string, ok bool) {
	if len(text) == 0 || text[0] != '"' {
		return "", "", false
	}
	end := strings.IndexByte(text[1:], '"')
	if end < 0 || !strings.HasPrefix(text[end+2:], then) {
		return "", "", false
	}
	return text[1 : end+1], text[end+2:], true
}
