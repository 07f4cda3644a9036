package httpidem_test

import (
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/httpidem"
	"github.com/commitbox/commitbox/inbox"
)

// TestDraftStatuses is the status vocabulary of draft-ietf-httpapi-idempotency-key-header, sections 2.6 and 2.7, and what
// this package adds to it.
func TestDraftStatuses(t *testing.T) {
	t.Parallel()
	entered, leave := make(chan struct{}), make(chan struct{})
	w := newWorld(t, httpidem.Config{Docs: "https://api.example/keys", BodyMax: 100}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if r.URL.Path == "/slow" {
			close(entered)
			<-leave
		}
		return create(w, r, tx)
	})
	w.wantStatus(w.do(keyed("done")), http.StatusCreated)
	running := make(chan answer)
	go func() {
		a, _ := w.send(t.Context(), request{path: "slow", keys: []string{`"runs"`}})
		running <- a
	}()
	<-entered

	for _, c := range []struct {
		name    string
		request request
		status  int
		replay  bool
		retry   bool
	}{
		{"first request", keyed("new"), 201, false, false},
		{"retry after the end", keyed("done"), 201, true, false},
		{"retry while the original runs", request{path: "slow", keys: []string{`"runs"`}}, 409, false, true},
		{"key used with another body", request{keys: []string{`"done"`}, body: `{"x":1}`}, 422, false, false},
		{"key used with another path", request{keys: []string{`"done"`}, path: "else", body: "{}"}, 422, false, false},
		{"key used with another query", request{keys: []string{`"done"`}, path: "?a=b", body: "{}"}, 422, false, false},
		{"key used with another method", request{method: "PATCH", keys: []string{`"done"`}, body: "{}"}, 422, false, false},
		{"key used by another caller", request{keys: []string{`"done"`}, body: "{}", tenant: "rival"}, 201, false, false},
		{"key is missing: POST", request{}, 400, false, false},
		{"key is missing: PATCH", request{method: "PATCH"}, 400, false, false},
		{"key is not needed: PUT", request{method: "PUT"}, 201, false, false},
		{"key is given all the same: PUT", request{method: "PUT", keys: []string{`"put"`}}, 201, false, false},
		{"key is given again: PUT", request{method: "PUT", keys: []string{`"put"`}}, 201, true, false},
		{"key means nothing: GET", request{method: "GET", keys: []string{`"done"`}}, 201, false, false},
		{"two keys", request{keys: []string{`"a"`, `"b"`}}, 400, false, false},
		{"key is no string", request{keys: []string{`a`}}, 400, false, false},
		{"key is empty", request{keys: []string{`""`}}, 400, false, false},
		{"key is too long", keyed(strings.Repeat("k", 256)), 400, false, false},
		{"longest key", keyed(strings.Repeat("k", 255)), 201, false, false},
		{"longest key again", keyed(strings.Repeat("k", 255)), 201, true, false},
		{"body is too large", request{keys: []string{`"big"`}, body: strings.Repeat("b", 101)}, 413, false, false},
		{"caller without a scope", request{keys: []string{`"done"`}, tenant: "nobody"}, 403, false, false},
		{"caller whose scope fails", request{keys: []string{`"done"`}, tenant: "expired"}, 403, false, false},
	} {
		a := w.do(c.request)
		t.Log(c.name)
		w.wantReplayed(a, c.replay)
		if c.status < 400 {
			w.wantStatus(a, c.status)
			continue
		}
		w.wantProblem(a, c.status)
		if got := a.header.Get("Retry-After"); (got != "") != c.retry || got == "0" {
			t.Errorf("%s: Retry-After is %q", c.name, got)
		}
		if link := a.header.Get("Link"); link != `<https://api.example/keys>; rel="describedby"` {
			t.Errorf("%s: the link is %q", c.name, link)
		}
	}
	close(leave)
	w.wantStatus(<-running, http.StatusCreated)
	w.wantReplayed(w.do(request{path: "slow", keys: []string{`"runs"`}}), true)
}

func TestOptionalKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t, httpidem.Config{Optional: true, AllowUnquoted: true}, create)
	w.wantStatus(w.do(request{}), http.StatusCreated)
	w.wantEffects(1)
	w.wantRows(0)
	w.wantReplayed(w.do(request{keys: []string{`8e03978e-40d5`}}), false)
	w.wantReplayed(w.do(request{keys: []string{`"8e03978e-40d5"`}}), true)
	w.wantProblem(w.do(request{keys: []string{`not a token`}}), http.StatusBadRequest)
	w.wantEffects(2)
}

// TestNewNamesEveryBadField also shows that no configuration replays a cookie or credentials.
func TestNewNamesEveryBadField(t *testing.T) {
	t.Parallel()
	_, err := httpidem.New(nil, httpidem.Config{
		Methods: []string{"POST", "GET"}, Headers: []string{"set-cookie", "authorization", "WWW-Authenticate", "Etag"},
		KeyMax: 256, BodyMax: -1, StoreMax: 2 << 20, RetryAfter: -1, Docs: ":", Inbox: inbox.Config{Wait: -1},
	})
	for _, field := range []string{"pool", "Name", "Scope", "Methods", "Set-Cookie", "Authorization", "Www-Authenticate", "KeyMax", "BodyMax", "StoreMax", "RetryAfter", "Docs", "Wait"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not named: %v", field, err)
		}
	}
	if strings.Contains(err.Error(), "Etag") || errors.Is(err, inbox.ErrDead) {
		t.Errorf("named without a reason: %v", err)
	}
}
