package httpidem

import (
	"maps"
	"net/http"
)

// Response headers that this package sets.
const (
	// HeaderReplayed is "true" on a stored response, and on no other.
	HeaderReplayed = "Idempotency-Replayed"
	// HeaderBody is "omitted" on a stored response whose body was not kept.
	HeaderBody = "Idempotency-Body"
)

// response is what is kept of a response.
type response struct {
	Status  int         `json:"status"`
	Header  http.Header `json:"header,omitempty"`
	Body    []byte      `json:"body,omitempty"`
	Omitted bool        `json:"omitted,omitempty"` // there was a body, and it is not kept
}

// ResultVersion implements [inbox.Versioned].
func (response) ResultVersion() byte { return 1 }

// stored returns what is kept: the headers of the list, and a body that was not streamed and is not over the limit.
func (rec *recorder) stored(headers []string, bodyMax int) response {
	out := response{Status: rec.status, Header: http.Header{}, Body: rec.body}
	if len(rec.body) > bodyMax || rec.flushed {
		out.Body, out.Omitted = nil, true
	}
	for _, name := range headers {
		if values := rec.sent.Values(name); len(values) > 0 {
			out.Header[name] = values
		}
	}
	return out
}

// replay sends a stored response.
func (s *response) replay(w http.ResponseWriter) {
	header := w.Header()
	maps.Copy(header, s.Header)
	header.Set(HeaderReplayed, "true")
	if s.Omitted {
		header.Set(HeaderBody, "omitted")
		header.Del("Content-Type") // of a body that is not there
		header.Del("Content-Encoding")
	}
	w.WriteHeader(s.Status)
	_, _ = w.Write(s.Body) // a client that is gone asks again
}
