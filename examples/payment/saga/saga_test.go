package saga

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/examples/payment/provider"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// world is a worker without a broker, and a payment service in this process.
type world struct {
	*Worker
	t       *testing.T
	service *provider.Service
}

func newWorld(t *testing.T, stock string) *world {
	t.Helper()
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), Tables+stock); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, service: &provider.Service{}}
	server := httptest.NewServer(w.service)
	t.Cleanup(server.Close)
	w.Worker = newWorker(t, db.Pool, server)
	return w
}

func newWorker(t *testing.T, pool *pgxpool.Pool, server *httptest.Server) *Worker {
	t.Helper()
	w, err := New(pool, Config{
		PaymentsURL: server.URL, Client: server.Client(),
		Inbox: inbox.Config{LeaseFor: time.Second, BackoffBase: time.Millisecond, BackoffMax: time.Millisecond},
	})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// order writes an order of one line for each quantity.
func (w *world) order(id, sku string, quantities ...int) Placed {
	w.t.Helper()
	err := pgx.BeginFunc(w.t.Context(), w.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(w.t.Context(), `insert into orders (id, customer, amount) values ($1, 'c', 100)`, id)
		for _, n := range quantities {
			if err == nil {
				_, err = tx.Exec(w.t.Context(), `insert into order_line values ($1, $2, $3)`, id, sku, n)
			}
		}
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return Placed{OrderID: id, Amount: 100}
}

// pay handles the message of an order once.
func (w *world) pay(id string) error {
	msg := inbox.Message{
		ID: inbox.ID{Consumer: consumerName, Message: id}, Payload: fmt.Appendf(nil, `{"order_id":%q,"amount":100}`, id),
	}
	_, err := inbox.ProcessLeased(w.t.Context(), w.box, msg, func(ctx context.Context, lease *inbox.Lease) (inbox.Void, error) {
		return inbox.Void{}, w.handle(ctx, lease, msg.Payload)
	})
	return err
}

func (w *world) want(sql string, want any) {
	w.t.Helper()
	var got string
	if err := w.pool.QueryRow(context.Background(), `select (`+sql+`)::text`).Scan(&got); err != nil {
		w.t.Fatal(err)
	}
	if got != fmt.Sprint(want) {
		w.t.Errorf("%s: %s, want %v", sql, got, want)
	}
}

const someApples = `insert into stock values ('apple', 1, 10)`

// TestA5_AStepDecidesOnce runs each step of the database again, at the same time and afterwards, as a worker that was
// believed dead does.
func TestA5_AStepDecidesOnce(t *testing.T) {
	w := newWorld(t, someApples)
	order := w.order("o", "apple", 2, 3)
	eight := func(step func(context.Context, string) (string, error), want string) {
		t.Helper()
		var group sync.WaitGroup
		for range 8 {
			group.Go(func() {
				if got, err := step(t.Context(), order.OrderID); err != nil || got != want {
					t.Errorf("the step says %q, %v; want %q", got, err, want)
				}
			})
		}
		group.Wait()
	}
	eight(w.reserve, stockReserved)
	w.want(`select on_hand || '/' || reserved from stock`, "10/5") // both lines of one SKU count
	eight(w.deduct, stockTaken)
	w.want(`select on_hand || '/' || reserved from stock`, "5/0")
	eight(w.reserve, stockTaken) // it comes too late and changes nothing
	w.want(`select on_hand || '/' || reserved from stock`, "5/0")

	w.order("p", "apple", 6)
	if state, err := w.reserve(t.Context(), "p"); err != nil || state != stockRefused {
		t.Errorf("six of five are %q, %v", state, err)
	}
	if _, err := w.deduct(t.Context(), "p"); err == nil {
		t.Error("what was refused can be taken")
	}
	w.want(`select on_hand || '/' || reserved from stock`, "5/0")
}

// TestA5_StockNeverNegative: fifty orders at once for ten apples.
func TestA5_StockNeverNegative(t *testing.T) {
	w := newWorld(t, someApples)
	var group sync.WaitGroup
	for i := range 50 {
		id := fmt.Sprint("o", i)
		w.order(id, "apple", 1)
		group.Go(func() {
			if err := w.pay(id); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	w.want(`select string_agg(status || ' ' || n, ', ' order by status) from (select status, count(*) n from orders group by 1) x`, "confirmed 10, refused 40")
	w.want(`select on_hand || '/' || reserved from stock`, "0/0")
	w.want(`select count(*) from commitbox.outbox_message`, 50)
	if n := len(w.ledger().Entries); n != 10 {
		t.Errorf("%d charges", n)
	}
}

func (w *world) ledger() provider.Ledger {
	w.t.Helper()
	return w.service.Snapshot()
}

// TestA5_AnErrorOfThePaymentServiceDecidesNothing: every kind of error, over and over; each order ends, charged once.
func TestA5_AnErrorOfThePaymentServiceDecidesNothing(t *testing.T) {
	w := newWorld(t, someApples)
	w.service.Faults, w.service.Hang = true, 100*time.Millisecond
	for i := range 8 {
		id := fmt.Sprint("o", i)
		w.order(id, "apple", 1)
		tries := 0
		for err := w.pay(id); err != nil; err = w.pay(id) {
			if !errors.Is(err, inbox.ErrFailed) && !errors.Is(err, inbox.ErrNotDue) || tries > 500 {
				t.Fatal(err)
			}
			tries++
			time.Sleep(time.Millisecond)
		}
	}
	w.want(`select count(*) from orders where status = 'confirmed'`, 8)
	w.want(`select bool_or(attempts > 1) from commitbox.inbox`, true)
	if l := w.ledger(); len(l.Entries) != 8 {
		t.Errorf("%d charges for 8 orders: %v", len(l.Entries), l.Faults)
	}
}

// TestA5_AForgottenKeyIsNotSent: the payment service charges, never answers, and forgets. The order goes to a person, and no
// further call is made.
func TestA5_AForgottenKeyIsNotSent(t *testing.T) {
	w := newWorld(t, someApples)
	var calls atomic.Int32
	deaf := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		calls.Add(1)
		w.WriteHeader(http.StatusInternalServerError)
	}))
	t.Cleanup(deaf.Close)
	w.Worker = newWorker(t, w.pool, deaf)
	w.order("o", "apple", 1)
	if err := w.pay("o"); !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("an error of the service is %v", err)
	}
	w.cfg.KeysFor = time.Microsecond // it keeps keys for no time at all
	time.Sleep(20 * time.Millisecond)
	if err := w.pay("o"); !errors.Is(err, inbox.ErrDead) || !strings.Contains(err.Error(), "by hand") {
		t.Errorf("want the order given up: %v", err)
	}
	if n := calls.Load(); n != 1 {
		t.Errorf("%d calls", n)
	}
	w.want(`select status || ' ' || stock from orders`, "open reserved")
	w.want(`select payload is not null and last_error like '%by hand%' from commitbox.inbox`, true)
}

// TestA5_ABugEndsNoOrder: an error that the database calls permanent is mended, and the order goes on behind its charge.
func TestA5_ABugEndsNoOrder(t *testing.T) {
	w := newWorld(t, someApples+`; alter table orders rename column charge_id to mislaid`)
	w.order("o", "apple", 1)
	if err := w.pay("o"); !errors.Is(err, inbox.ErrFailed) {
		t.Errorf("a missing column is %v", err)
	}
	if _, err := w.pool.Exec(t.Context(), `alter table orders rename column mislaid to charge_id`); err != nil {
		t.Fatal(err)
	}
	time.Sleep(20 * time.Millisecond)
	if err := w.pay("o"); err != nil {
		t.Error(err)
	}
	w.want(`select status from orders`, Confirmed)
	if l := w.ledger(); len(l.Entries) != 1 || l.Calls != 1 {
		t.Errorf("the charge is asked for again: %+v", l)
	}
}

func TestAMessageThatIsNoOrderIsGivenUp(t *testing.T) {
	w := newWorld(t, someApples)
	msg := inbox.Message{ID: inbox.ID{Consumer: consumerName, Message: "m"}, Payload: []byte("nonsense")}
	_, err := inbox.ProcessLeased(t.Context(), w.box, msg, func(ctx context.Context, lease *inbox.Lease) (inbox.Void, error) {
		return inbox.Void{}, w.handle(ctx, lease, msg.Payload)
	})
	if !errors.Is(err, inbox.ErrDead) || inbox.Disposition(err).Verdict != inbox.Ack {
		t.Errorf("want it dead with its payload kept: %v", err)
	}
}

// TestPaymentAnswers: what counts as an answer.
func TestPaymentAnswers(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		status   int
		body     string
		declined bool
		problem  string
	}{
		{http.StatusCreated, `{"id":"ch_1"}`, false, ""},
		{http.StatusPaymentRequired, `{"error":"declined"}`, true, ""},
		{http.StatusCreated, `{}`, false, "201"},
		{http.StatusCreated, `not JSON`, false, "payment service"},
		{http.StatusOK, `{"id":"ch_1"}`, false, "200"},
		{http.StatusConflict, ``, false, "409"},
		{http.StatusUnprocessableEntity, ``, false, "422"},
		{http.StatusInternalServerError, ``, false, "500"},
	} {
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if key := r.Header.Get("Idempotency-Key"); key != `"charge-o"` {
				t.Errorf("the key is %s", key)
			}
			w.WriteHeader(c.status)
			_, _ = w.Write([]byte(c.body))
		}))
		p := payments{server.URL, server.Client()}
		charge, err := p.charge(t.Context(), Placed{OrderID: "o", Amount: 1})
		if charge.Declined != c.declined || (err == nil) != (c.problem == "") || err != nil && !strings.Contains(err.Error(), c.problem) {
			t.Errorf("%d %s: %+v, %v", c.status, c.body, charge, err)
		}
		server.Close()
	}
}
