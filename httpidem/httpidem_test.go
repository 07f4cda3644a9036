package httpidem_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/httpidem"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestReplayHasStatusListedHeadersAndBody(t *testing.T) {
	t.Parallel()
	w := newWorld(t, httpidem.Config{Headers: []string{"Location", "X-Order"}}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		for name, value := range map[string]string{
			"Set-Cookie": "session=1", "Authorization": "Bearer 1", "Www-Authenticate": "Basic", "X-Order": "7", "X-Trace": "1",
			httpidem.HeaderReplayed: "true", "Connection": "close",
		} {
			w.Header().Set(name, value)
		}
		return create(w, r, tx)
	})
	first, second := w.do(keyed("a")), w.do(keyed("a"))
	w.wantReplayed(first, false)
	w.wantReplayed(second, true)
	w.wantStatus(second, http.StatusCreated)
	if first.body != "made from {}" || second.body != first.body {
		t.Errorf("bodies are %q and %q", first.body, second.body)
	}
	for name, want := range map[string][2]string{
		"Location": {"/orders/1", "/orders/1"}, "X-Order": {"7", "7"}, "X-Trace": {"1", ""}, "Set-Cookie": {"session=1", ""},
		"Authorization": {"Bearer 1", ""}, "Www-Authenticate": {"Basic", ""},
	} {
		if got := [2]string{first.header.Get(name), second.header.Get(name)}; got != want {
			t.Errorf("%s is %q, want %q", name, got, want)
		}
	}
	w.wantEffects(1)
}

// TestCopiesAtOnce sends twenty copies side by side.
func TestCopiesAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, httpidem.Config{}, create)
	var group sync.WaitGroup
	var executed atomic.Int32
	for range 20 {
		group.Go(func() {
			a, err := w.send(t.Context(), keyed("same"))
			switch replayed := a.header.Get(httpidem.HeaderReplayed) == "true"; {
			case err != nil:
				t.Error(err)
			case a.status == http.StatusCreated && !replayed:
				executed.Add(1)
			case a.status != http.StatusConflict && !replayed:
				t.Errorf("status %d: %s", a.status, a.body)
			}
		})
	}
	group.Wait()
	if n := executed.Load(); n != 1 {
		t.Errorf("%d requests were told that they are the first", n)
	}
	w.wantEffects(1)
}

// TestNotKept: what tells of the moment is sent, rolled back, and leaves no trace; however often it happens, the key stays
// good.
func TestNotKept(t *testing.T) {
	t.Parallel()
	var mood atomic.Value // how the handler ends
	w := newWorld(t, httpidem.Config{}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		end := mood.Load()
		if end == "ok" {
			return create(w, r, tx)
		}
		if err := note(r.Context(), tx, "partial"); err != nil {
			return err
		}
		switch end := end.(type) {
		case int:
			w.Header().Set("Retry-After", "7")
			w.WriteHeader(end)
			_, err := io.WriteString(w, "of the handler")
			return err
		case string:
			if end == "panic" {
				panic("handler")
			}
		}
		w.WriteHeader(http.StatusOK)
		return errors.New("a secret")
	})
	for _, end := range []any{500, 502, 503, 504, 599, 429, 408, 425, 401, 403} {
		mood.Store(end)
		for range 3 {
			a := w.do(keyed("k"))
			w.wantStatus(a, end.(int))
			if a.body != "of the handler" || a.header.Get("Retry-After") != "7" {
				t.Errorf("the handler's answer is gone: %v %q", a.header, a.body)
			}
			w.wantRows(0)
		}
		mood = atomic.Value{}
	}
	mood.Store("error")
	a := w.do(keyed("k"))
	w.wantProblem(a, http.StatusInternalServerError)
	if strings.Contains(a.body, "secret") {
		t.Errorf("the client hears the error: %s", a.body)
	}
	mood.Store("panic")
	if _, err := w.send(t.Context(), keyed("k")); err == nil {
		t.Error("the panic did not go on to the server")
	}
	w.wantRows(0)
	w.wantEffects(0)
	mood.Store("ok")
	w.wantReplayed(w.do(keyed("k")), false)
	w.wantReplayed(w.do(keyed("k")), true)
	w.wantEffects(1)
}

// TestOtherStatusesAreKept: an error of the request is its answer for good.
func TestOtherStatusesAreKept(t *testing.T) {
	t.Parallel()
	for _, status := range []int{200, 202, 204, 303, 304, 400, 404, 409, 410, 422} {
		w := newWorld(t, httpidem.Config{}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			w.WriteHeader(http.StatusEarlyHints) // means nothing
			w.WriteHeader(status)
			w.WriteHeader(http.StatusInternalServerError) // too late
			w.Header().Set("Location", "/late")
			return note(r.Context(), tx, "kept")
		})
		w.server.Client().CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
		w.wantStatus(w.do(keyed("k")), status)
		a := w.do(keyed("k"))
		w.wantStatus(a, status)
		w.wantReplayed(a, true)
		if a.header.Get("Location") != "" {
			t.Error("a header that was set too late is sent")
		}
		w.wantEffects(1)
	}
}

// TestLargeAndStreamedBodies: neither is kept, neither is committed by half.
func TestLargeAndStreamedBodies(t *testing.T) {
	t.Parallel()
	w := newWorld(t, httpidem.Config{StoreMax: 10, ResponseMax: 100}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if err := note(r.Context(), tx, r.URL.Path); err != nil {
			return err
		}
		w.Header().Set("Content-Type", "text/plain")
		size := map[string]int{"/fits": 10, "/large": 11, "/huge": 101, "/streamed": 5}[r.URL.Path]
		_, err := io.WriteString(w, strings.Repeat("x", size))
		if r.URL.Path == "/huge" {
			if !errors.Is(err, httpidem.ErrResponseTooLarge) {
				t.Errorf("writing too much is %v", err)
			}
			return nil // it did not look
		}
		if r.URL.Path == "/streamed" {
			if _, flusher := w.(http.Flusher); flusher {
				t.Error("the handler can stream")
			}
			if err := http.NewResponseController(w).Flush(); !errors.Is(err, http.ErrNotSupported) {
				t.Errorf("flush is %v", err)
			}
		}
		return err
	})
	for path, size := range map[string]int{"fits": 10, "large": 11, "streamed": 5} {
		q := request{path: path, keys: []string{`"` + path + `"`}}
		if a := w.do(q); a.status != http.StatusOK || len(a.body) != size {
			t.Errorf("%s: %d with %d bytes", path, a.status, len(a.body))
		}
		a := w.do(q)
		w.wantStatus(a, http.StatusOK)
		w.wantReplayed(a, true)
		omitted := path != "fits"
		if got := a.header.Get(httpidem.HeaderBody) == "omitted"; got != omitted || omitted != (a.body == "") {
			t.Errorf("%s: omitted %v, body %q", path, got, a.body)
		}
	}
	w.wantEffects(3)
	w.wantProblem(w.do(request{path: "huge", keys: []string{`"huge"`}}), http.StatusInternalServerError)
	w.wantEffects(3)
	w.wantRows(3)
}

// TestClientGoesAway: before the commit everything is rolled back, after it the response is kept.
func TestClientGoesAway(t *testing.T) {
	t.Parallel()
	entered := make(chan struct{}, 1)
	var wait atomic.Bool
	wait.Store(true)
	w := newWorld(t, httpidem.Config{}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if err := create(w, r, tx); err != nil {
			return err
		}
		if wait.Load() {
			entered <- struct{}{}
			<-r.Context().Done()
		}
		return r.Context().Err()
	})
	ctx, cancel := context.WithCancel(t.Context())
	go func() {
		<-entered
		cancel()
	}()
	if a, err := w.send(ctx, keyed("k")); err == nil {
		t.Errorf("answered with %d", a.status)
	}
	wait.Store(false)
	var a answer
	for a = w.do(keyed("k")); a.status == http.StatusConflict; a = w.do(keyed("k")) { // the first one is not rolled back yet
		time.Sleep(10 * time.Millisecond)
	}
	w.wantStatus(a, http.StatusCreated)
	w.wantReplayed(a, false)
	w.wantEffects(1)

	deaf := deafWriter{httptest.NewRecorder()}
	r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader("{}"))
	r.Header.Set("Idempotency-Key", `"deaf"`)
	w.server.Config.Handler.ServeHTTP(deaf, r)
	w.wantReplayed(w.do(keyed("deaf")), true)
	w.wantEffects(2)
}

// deafWriter is a client who is gone when the response is written.
type deafWriter struct{ *httptest.ResponseRecorder }

func (deafWriter) Write([]byte) (int, error) { return 0, errors.New("broken pipe") }

func TestConflictRunsAgainWithTheBody(t *testing.T) {
	t.Parallel()
	runs := 0
	w := newWorld(t, httpidem.Config{}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if err := create(w, r, tx); err != nil {
			return err
		}
		if runs++; runs < 3 {
			return &pgconn.PgError{Code: "40001"}
		}
		return nil
	})
	a := w.do(keyed("k"))
	w.wantStatus(a, http.StatusCreated)
	if runs != 3 || a.body != "made from {}" {
		t.Errorf("%d runs, body %q", runs, a.body)
	}
	w.wantEffects(1)
}

// TestHandlerThatBreaksItsTransaction answers 201 although PostgreSQL will not commit. The key stays good.
func TestHandlerThatBreaksItsTransaction(t *testing.T) {
	t.Parallel()
	broken := true
	w := newWorld(t, httpidem.Config{}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		if broken {
			_, _ = tx.Exec(r.Context(), `select 1/0`)
		}
		if err := tx.Commit(r.Context()); !errors.Is(err, inbox.ErrTxOwned) {
			t.Errorf("commit in a handler is %v", err)
		}
		if broken {
			w.WriteHeader(http.StatusCreated)
			return nil
		}
		return create(w, r, tx)
	})
	for range 15 {
		w.wantProblem(w.do(keyed("k")), http.StatusInternalServerError)
	}
	w.wantProblem(w.do(request{method: http.MethodPut}), http.StatusInternalServerError) // without a key
	broken = false
	w.wantStatus(w.do(keyed("k")), http.StatusCreated)
	w.wantStatus(w.do(request{method: http.MethodPut}), http.StatusCreated)
	w.wantEffects(2)
}

// TestRefusedCommit: PostgreSQL finds only at COMMIT that a row is wrong. That buries no key either, and is logged.
func TestRefusedCommit(t *testing.T) {
	t.Parallel()
	var logged bytes.Buffer
	w := newWorld(t, httpidem.Config{Inbox: inbox.Config{Logger: slog.New(slog.NewTextHandler(&logged, nil))}}, create)
	_, err := w.pool.Exec(t.Context(), `
		create function refuse() returns trigger language plpgsql as $$begin
			if new.note = '{}' then raise check_violation; end if;
			return null;
		end$$;
		create constraint trigger refuse after insert on effect deferrable initially deferred for each row execute function refuse()`)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		w.wantProblem(w.do(keyed("k")), http.StatusInternalServerError)
	}
	if _, err := w.pool.Exec(t.Context(), `drop trigger refuse on effect`); err != nil {
		t.Fatal(err)
	}
	w.wantStatus(w.do(keyed("k")), http.StatusCreated)
	w.wantEffects(1)
	w.server.Close() // all is logged
	if n := strings.Count(logged.String(), "23514"); n != 3 {
		t.Errorf("%d of 3 refusals are logged: %s", n, &logged)
	}
}

// TestUnknownCommit: the answer to COMMIT is lost and the database is away. The client hears that nothing is known, and its
// repeat finds out.
func TestUnknownCommit(t *testing.T) {
	t.Parallel()
	w, proxy := newCutWorld(t, func(proxy *testenv.Proxy) { proxy.Refuse(true) }) // the open connection goes on
	proxy.CutAfter("commit\x00")
	a := w.do(keyed("k"))
	w.wantProblem(a, http.StatusServiceUnavailable)
	if a.header.Get("Retry-After") == "" || !strings.Contains(a.body, "may have been done") {
		t.Errorf("the client hears %v %s", a.header, a.body)
	}
	a = w.do(keyed("other"))
	w.wantProblem(a, http.StatusServiceUnavailable)
	if a.header.Get("Retry-After") == "" || !strings.Contains(a.body, "Nothing was done") {
		t.Errorf("the client hears %v %s", a.header, a.body)
	}
	proxy.Refuse(false)
	a = w.do(keyed("k"))
	w.wantReplayed(a, true)
	w.wantStatus(a, http.StatusCreated)
	w.wantEffects(1)
}

// newCutWorld is a world behind a proxy that cuts the connection when it is told to; meanwhile is called in each handler.
func newCutWorld(t *testing.T, meanwhile func(*testenv.Proxy)) (*world, *testenv.Proxy) {
	t.Helper()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), `create table effect (note text)`); err != nil {
		t.Fatal(err)
	}
	proxy := testenv.NewProxy(t, db.URL)
	pool, err := pgxpool.New(t.Context(), proxy.URL(t, db.URL)+"&default_query_exec_mode=exec") // COMMIT is sent as such
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	w := newWorldOn(t, pool, httpidem.Config{Inbox: inbox.Config{CommitWait: 200 * time.Millisecond}}, func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
		meanwhile(proxy)
		return create(w, r, tx)
	})
	return w, proxy
}

// TestUnknownCommitWithoutAKey: nobody can find out, and nobody is told that nothing was done.
func TestUnknownCommitWithoutAKey(t *testing.T) {
	t.Parallel()
	w, proxy := newCutWorld(t, func(*testenv.Proxy) {})
	for effects, cut := range []func(string) <-chan struct{}{proxy.CutBefore, proxy.CutAfter} {
		cut("commit\x00")
		a := w.do(request{method: http.MethodPut})
		w.wantProblem(a, http.StatusInternalServerError)
		if !strings.Contains(a.body, "may have been done") || a.header.Get("Retry-After") != "" {
			t.Errorf("the client hears %v %s", a.header, a.body)
		}
		w.wantEffects(effects)
	}
}

// TestOperatorsEnds: rows that an operator has ended have no response.
func TestOperatorsEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, httpidem.Config{}, create)
	id, err := inbox.NewID("http", "orders", "acme", "by hand")
	if err != nil {
		t.Fatal(err)
	}
	err = pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		return inbox.MarkCompleted(t.Context(), tx, id, inbox.Void{}, "done by phone")
	})
	if err != nil {
		t.Fatal(err)
	}
	a := w.do(keyed("by hand"))
	w.wantProblem(a, http.StatusConflict)
	if a.header.Get("Retry-After") != "" {
		t.Error("the client is told to try again")
	}
	w.wantEffects(0)
}

func TestBodyThatBreaksOff(t *testing.T) {
	t.Parallel()
	w := newWorld(t, httpidem.Config{BodyMax: 10}, create)
	for _, c := range []struct {
		body   io.Reader
		status int
	}{
		{io.MultiReader(strings.NewReader("half"), brokenReader{}), http.StatusBadRequest},
		{io.MultiReader(strings.NewReader("longer than the limit")), http.StatusRequestEntityTooLarge}, // no Content-Length
	} {
		r := httptest.NewRequest(http.MethodPost, "/", c.body)
		r.Header.Set("Idempotency-Key", `"k"`)
		out := httptest.NewRecorder()
		w.server.Config.Handler.ServeHTTP(out, r)
		if out.Code != c.status {
			t.Errorf("status %d, want %d", out.Code, c.status)
		}
	}
	w.wantEffects(0)
}

// TestBodyThatWasReadBefore, such as by a middleware that parses forms: without its body, any request would be a repeat.
func TestBodyThatWasReadBefore(t *testing.T) {
	t.Parallel()
	w := newWorld(t, httpidem.Config{}, create)
	for _, body := range []string{"a=1", "a=2"} {
		r := httptest.NewRequest(http.MethodPost, "/", strings.NewReader(body))
		r.Header.Set("Idempotency-Key", `"k"`)
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		if err := r.ParseForm(); err != nil {
			t.Fatal(err)
		}
		out := httptest.NewRecorder()
		w.server.Config.Handler.ServeHTTP(out, r)
		if out.Code != http.StatusInternalServerError {
			t.Errorf("status %d", out.Code)
		}
	}
	w.wantEffects(0)
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }
