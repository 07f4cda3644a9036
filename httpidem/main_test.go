package httpidem_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/httpidem"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

var quiet = slog.New(slog.DiscardHandler)

// world is an API with one route on a database with a table that handlers write to. The table has no unique key, so that a
// double effect shows.
type world struct {
	t      *testing.T
	pool   *pgxpool.Pool
	server *httptest.Server
}

func newWorld(t *testing.T, cfg httpidem.Config, handler httpidem.Handler) *world {
	t.Helper()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), `create table effect (note text)`); err != nil {
		t.Fatal(err)
	}
	return newWorldOn(t, db.Pool, cfg, handler)
}

func newWorldOn(t *testing.T, pool *pgxpool.Pool, cfg httpidem.Config, handler httpidem.Handler) *world {
	t.Helper()
	cfg.Name = "orders"
	if cfg.Inbox.Logger == nil {
		cfg.Inbox.Logger = quiet
	}
	if cfg.Scope == nil {
		cfg.Scope = tenant
	}
	m, err := httpidem.New(pool, cfg)
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(m.Handle(handler))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	server.Start()
	t.Cleanup(server.Close)
	return &world{t: t, pool: pool, server: server}
}

// tenant stands for what authentication has found out.
func tenant(r *http.Request) (string, error) {
	switch name := r.Header.Get("Tenant"); name {
	case "nobody":
		return "", nil
	case "expired":
		return "", errors.New("expired")
	case "":
		return "acme", nil
	default:
		return name, nil
	}
}

// request is a POST unless it says otherwise.
type request struct {
	method, path, body, tenant string
	keys                       []string // values of the header, as they are sent
}

func keyed(key string) request { return request{keys: []string{`"` + key + `"`}, body: "{}"} }

// answer is a response that was read to its end.
type answer struct {
	status int
	header http.Header
	body   string
}

func (w *world) send(ctx context.Context, q request) (answer, error) {
	if q.method == "" {
		q.method = http.MethodPost
	}
	r, err := http.NewRequestWithContext(ctx, q.method, w.server.URL+"/"+q.path, strings.NewReader(q.body))
	if err != nil {
		return answer{}, err
	}
	r.Header["Idempotency-Key"] = q.keys
	if q.tenant != "" {
		r.Header.Set("Tenant", q.tenant)
	}
	resp, err := w.server.Client().Do(r)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, string(body)}, err
}

func (w *world) do(q request) answer {
	w.t.Helper()
	a, err := w.send(w.t.Context(), q)
	if err != nil {
		w.t.Fatal(err)
	}
	return a
}

func (w *world) wantStatus(a answer, status int) {
	w.t.Helper()
	if a.status != status {
		w.t.Errorf("status %d, want %d: %s", a.status, status, a.body)
	}
}

func (w *world) wantReplayed(a answer, replayed bool) {
	w.t.Helper()
	if got := a.header.Get(httpidem.HeaderReplayed) == "true"; got != replayed {
		w.t.Errorf("replayed: %v, want %v (status %d: %s)", got, replayed, a.status, a.body)
	}
}

func (w *world) wantProblem(a answer, status int) {
	w.t.Helper()
	w.wantStatus(a, status)
	var p struct {
		Type, Title string
		Status      int
	}
	if err := json.Unmarshal([]byte(a.body), &p); err != nil || a.header.Get("Content-Type") != "application/problem+json" {
		w.t.Errorf("want problem details, got %v %q", a.header, a.body)
	}
	if p.Status != status || p.Title == "" || p.Type == "" {
		w.t.Errorf("the problem is %+v", p)
	}
}

func (w *world) count(sql string, want int) {
	w.t.Helper()
	var got int
	if err := w.pool.QueryRow(context.Background(), sql).Scan(&got); err != nil {
		w.t.Fatal(err)
	}
	if got != want {
		w.t.Errorf("%s: %d, want %d", sql, got, want)
	}
}

func (w *world) wantEffects(want int) {
	w.t.Helper()
	w.count(`select count(*) from effect`, want)
}

func (w *world) wantRows(want int) {
	w.t.Helper()
	w.count(`select count(*) from commitbox.inbox`, want)
}

func note(ctx context.Context, tx pgx.Tx, text string) error {
	_, err := tx.Exec(ctx, `insert into effect values ($1)`, text)
	return err
}

// create writes one effect and answers 201 with its body.
func create(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	if err := note(r.Context(), tx, string(body)); err != nil {
		return err
	}
	w.Header().Set("Location", "/orders/1")
	w.WriteHeader(http.StatusCreated)
	_, err = io.Copy(w, bytes.NewReader(append([]byte("made from "), body...)))
	return err
}
