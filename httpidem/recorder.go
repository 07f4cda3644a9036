package httpidem

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
)

// ErrResponseTooLarge is what Write answers to a handler whose response is over Config.ResponseMax.
var ErrResponseTooLarge = errors.New("httpidem: the response is larger than Config.ResponseMax, so it is rolled back")

// recorder collects a response until it may be sent.
type recorder struct {
	header   http.Header // what the handler changes
	sent     http.Header // as it was at WriteHeader; later changes have no effect, as in net/http
	status   int
	body     []byte
	bodyMax  int
	tooLarge bool
	flushed  bool
}

// newRecorder returns a recorder that shows the headers which outer middleware has set already.
func newRecorder(outer http.Header, bodyMax int) *recorder {
	return &recorder{header: outer.Clone(), bodyMax: bodyMax}
}

// Header implements [http.ResponseWriter].
func (rec *recorder) Header() http.Header { return rec.header }

// WriteHeader implements [http.ResponseWriter]. Informational statuses are not sent.
func (rec *recorder) WriteHeader(status int) {
	if status < 100 || status > 999 {
		panic(fmt.Sprintf("httpidem: invalid status %d", status)) // as net/http does, and before anything is committed
	}
	if rec.status != 0 || status < 200 {
		return
	}
	rec.status, rec.sent = status, rec.header.Clone()
}

// Write implements [http.ResponseWriter].
func (rec *recorder) Write(p []byte) (int, error) {
	rec.WriteHeader(http.StatusOK)
	switch {
	case !bodyAllowed(rec.status):
		return 0, http.ErrBodyNotAllowed
	case rec.tooLarge || len(p) > rec.bodyMax-len(rec.body):
		rec.tooLarge = true
		return 0, ErrResponseTooLarge
	}
	rec.body = append(rec.body, p...)
	return len(p), nil
}

// FlushError is what [http.ResponseController] calls. There is no Flush, so that a handler which asks for an [http.Flusher]
// learns at once that it cannot stream.
func (rec *recorder) FlushError() error {
	rec.flushed = true
	return http.ErrNotSupported
}

// end is called when the handler has returned.
func (rec *recorder) end() { rec.WriteHeader(http.StatusOK) }

// send sends the response as the handler wrote it.
func (rec *recorder) send(w http.ResponseWriter) {
	header := w.Header()
	clear(header)
	maps.Copy(header, rec.sent)
	header.Del(HeaderReplayed) // says the truth only if nobody else may set it
	header.Del(HeaderBody)
	w.WriteHeader(rec.status)
	_, _ = w.Write(rec.body) // a client that is gone asks again
}

func bodyAllowed(status int) bool {
	return status >= 200 && status != http.StatusNoContent && status != http.StatusNotModified
}
