package shop

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/examples/payment/saga"
	"github.com/commitbox/commitbox/httpidem"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestOrders(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), saga.Tables+`insert into stock values ('apple', 100, 5)`); err != nil {
		t.Fatal(err)
	}
	api, err := New(db.Pool)
	if err != nil {
		t.Fatal(err)
	}
	send := func(method, path, customer, key, body string) *httptest.ResponseRecorder {
		r := httptest.NewRequest(method, path, strings.NewReader(body))
		r.Header["Customer"] = []string{customer}
		if key != "" {
			r.Header.Set("Idempotency-Key", `"`+key+`"`)
		}
		out := httptest.NewRecorder()
		api.ServeHTTP(out, r)
		return out
	}
	const order = `{"lines":[{"sku":"apple","quantity":2},{"sku":"apple","quantity":1}]}`
	first, again := send("POST", "/orders", "a", "k", order), send("POST", "/orders", "a", "k", order)
	var placed Placed
	if err := json.Unmarshal(first.Body.Bytes(), &placed); err != nil || placed.Amount != 300 || first.Body.String() != again.Body.String() ||
		again.Header().Get(httpidem.HeaderReplayed) != "true" || again.Header().Get("Location") != "/orders/"+placed.ID {
		t.Fatalf("%s and %s: %v", first.Body, again.Body, err)
	}
	for _, c := range []struct {
		method, path, customer, key, body string
		status                            int
	}{
		{"POST", "/orders", "a", "", order, http.StatusBadRequest},
		{"POST", "/orders", "", "k1", order, http.StatusForbidden},
		{"POST", "/orders", "a", "k", `{"lines":[{"sku":"apple","quantity":9}]}`, http.StatusUnprocessableEntity},
		{"POST", "/orders", "a", "k2", `nonsense`, http.StatusBadRequest},
		{"POST", "/orders", "a", "k3", `{"lines":[]}`, http.StatusBadRequest},
		{"POST", "/orders", "a", "k4", `{"lines":[{"sku":"apple","quantity":-1}]}`, http.StatusBadRequest},
		{"POST", "/orders", "a", "k5", `{"lines":[{"sku":"apple","quantity":1001}]}`, http.StatusBadRequest},
		{"POST", "/orders", "a", "k6", `{"lines":[{"sku":"gold","quantity":1}]}`, http.StatusNotFound},
		{"GET", "/orders/" + placed.ID, "a", "", "", http.StatusOK},
		{"GET", "/orders/" + placed.ID, "b", "", "", http.StatusNotFound},
		{"GET", "/orders/" + placed.ID, "", "", "", http.StatusForbidden},
		{"GET", "/orders/none", "a", "", "", http.StatusNotFound},
	} {
		if out := send(c.method, c.path, c.customer, c.key, c.body); out.Code != c.status {
			t.Errorf("%s %s %s: %d, want %d: %s", c.method, c.path, c.body, out.Code, c.status, out.Body)
		}
	}
	var orders, messages int
	err = db.Pool.QueryRow(t.Context(), `select (select count(*) from orders), (select count(*) from commitbox.outbox_message where topic = $1)`, saga.TopicPlaced).
		Scan(&orders, &messages)
	if err != nil || orders != 1 || messages != 1 {
		t.Errorf("%d orders and %d messages, %v", orders, messages, err)
	}
}
