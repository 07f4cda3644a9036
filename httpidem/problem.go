package httpidem

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"time"

	"github.com/commitbox/commitbox/inbox"
)

// problem is an answer of this package instead of the handler's: problem details of RFC 9457.
type problem struct {
	status int
	title  string
	detail string
	after  time.Duration // Retry-After, if it is not 0
}

const detailMore = " The same request may be sent again as it is."

// Problems that need no more than their text.
var (
	problemScope    = problem{status: http.StatusForbidden, title: "The caller is not known"}
	problemBodySize = problem{status: http.StatusRequestEntityTooLarge, title: "The request is too large"}
	problemBodyRead = problem{status: http.StatusBadRequest, title: "The request could not be read to its end"}
	problemFailed   = problem{status: http.StatusInternalServerError, title: "The operation failed"}
)

func problemKey(err error) *problem {
	title := "The Idempotency-Key cannot be used"
	if errors.Is(err, errKeyMissing) {
		title = "Idempotency-Key is missing"
	}
	return &problem{status: http.StatusBadRequest, title: title, detail: err.Error()}
}

// problemRolledBack says what a client hears of a handler that failed.
func problemRolledBack(failure error, after time.Duration) *problem {
	if inbox.Retryable(failure) {
		return &problem{http.StatusServiceUnavailable, "The service is not available", "Nothing was done." + detailMore, after}
	}
	return &problem{status: http.StatusInternalServerError, title: "The operation failed", detail: "Nothing was done." + detailMore}
}

// problemOf says what a client hears where the inbox has no response for it.
func problemOf(err error, after time.Duration) *problem {
	var e *inbox.Error
	if errors.As(err, &e) && e.RetryAfter > after {
		after = e.RetryAfter
	}
	switch {
	case errors.Is(err, inbox.ErrInProgress):
		return &problem{http.StatusConflict, "A request is outstanding for this Idempotency-Key", "It has not ended yet." + detailMore, after}
	case errors.Is(err, inbox.ErrPayloadMismatch):
		return &problem{
			http.StatusUnprocessableEntity, "Idempotency-Key is already used",
			"The key was used before for another method, path or body. Use a new key for a new operation.", 0,
		}
	case errors.Is(err, inbox.ErrNoResult):
		return &problem{http.StatusConflict, "The operation is completed", "It will not run again, and its response was not kept.", 0}
	case errors.Is(err, inbox.ErrDead):
		return &problem{http.StatusConflict, "The operation was given up", "An operator stopped it. Use a new key to start another.", 0}
	case errors.Is(err, errUnguardedUnknown):
		return &problem{
			http.StatusInternalServerError, "The outcome is not known",
			"The operation may have been done. Without an Idempotency-Key nobody can tell.", 0,
		}
	case errors.Is(err, inbox.ErrOutcomeUnknown):
		return &problem{http.StatusServiceUnavailable, "The outcome is not known yet", "The operation may have been done." + detailMore, after}
	case inbox.Retryable(err) && !errors.Is(err, inbox.ErrFailed):
		return &problem{http.StatusServiceUnavailable, "The service is not available", "Nothing was done." + detailMore, after}
	}
	return &problemFailed
}

// send writes the problem. The URL is that of the API's documentation, or empty.
func (p *problem) send(w http.ResponseWriter, docs string) {
	body := struct {
		Type   string `json:"type"`
		Title  string `json:"title"`
		Status int    `json:"status"`
		Detail string `json:"detail,omitempty"`
	}{"about:blank", p.title, p.status, p.detail}
	header := w.Header()
	if docs != "" {
		body.Type = docs
		header.Add("Link", "<"+docs+`>; rel="describedby"`)
	}
	header.Set("Content-Type", "application/problem+json")
	header.Set("Cache-Control", "no-store")
	if p.after > 0 {
		header.Set("Retry-After", strconv.FormatInt(int64((p.after+time.Second-1)/time.Second), 10))
	}
	w.WriteHeader(p.status)
	_ = json.NewEncoder(w).Encode(body) // a client that is gone asks again
}
