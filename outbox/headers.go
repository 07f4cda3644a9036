package outbox

import (
	"bytes"
	"encoding/json"
	"fmt"
)

// setHeaders reads a message's headers. What cannot be read makes the row bad, not the batch.
func (r *row) setHeaders(text []byte) {
	var err error
	if r.Headers, err = headers(text); err != nil {
		r.bad = fmt.Errorf("headers are not an object of strings: %w", err)
	}
}

// headers reads an object of strings in the form in which PostgreSQL writes jsonb. Most have no escapes; they are split
// here, which takes a fifth of the time. Whatever looks different is left to encoding/json.
func headers(text []byte) (map[string]string, error) {
	if string(text) == "{}" {
		return nil, nil
	}
	if h := plainHeaders(text); h != nil {
		return h, nil
	}
	var h map[string]string
	err := json.Unmarshal(text, &h)
	return h, err
}

// plainHeaders reads {"name": "value", "name": "value"} without escapes, and returns nil for everything else.
func plainHeaders(text []byte) map[string]string {
	if len(text) < 2 || text[0] != '{' || bytes.IndexByte(text, '\\') >= 0 {
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
		h[string(name)] = string(value)
		switch {
		case string(after) == "}":
			return h
		case len(after) > 2 && string(after[:2]) == ", ":
			rest = after[2:]
		default:
			return nil
		}
	}
}

// quoted takes a string in quotation marks off the front; what follows has to begin with then.
func quoted(text []byte, then string) (inside, after []byte, ok bool) {
	if len(text) == 0 || text[0] != '"' {
		return nil, nil, false
	}
	end := bytes.IndexByte(text[1:], '"')
	if end < 0 || !bytes.HasPrefix(text[end+2:], []byte(then)) {
		return nil, nil, false
	}
	return text[1 : end+1], text[end+2:], true
}
