package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
	"github.com/commitbox/commitbox/internal/testenv"
)

// programVariable makes the test program run as the program itself.
const programVariable = "QUICKSTART_TEST_PROGRAM"

// TestMain is also the entry of the child processes that a run starts from the test program.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Getenv("QUICKSTART_NAME") != "" || os.Getenv(programVariable) != "" {
		main()
		return
	}
	testenv.Main(m)
}

// testOrders is enough for both kills to fall into a running flow.
const testOrders = 300

var bothKilled = regexp.MustCompile(`components killed and restarted +2\n`)

func TestQuickstart(t *testing.T) {
	t.Parallel()
	for _, broker := range []string{"rabbitmq", "memory"} {
		t.Run(broker, func(t *testing.T) {
			t.Parallel()
			cfg := config{Orders: testOrders, Broker: broker, DatabaseURL: testenv.EmptyDatabase(t).URL}
			if broker == "rabbitmq" {
				cfg.AMQPURL = testenv.RabbitMQ(t)
			}
			var out, status bytes.Buffer
			if err := run(t.Context(), cfg, &out, &status); err != nil {
				t.Fatalf("%v\n%s%s", err, &status, &out)
			}
			text := out.String()
			var got report
			if err := json.Unmarshal([]byte(lastLine(text)), &got); err != nil {
				t.Fatalf("last line: %v\n%s", err, text)
			}
			if got.Effects != testOrders || got.Lost != 0 || got.DoubleEffects != 0 {
				t.Errorf("want %d effects, none lost, none double:\n%s", testOrders, text)
			}
			// orders.placed goes to two queues and orders.paid to one; each queue gets every message at least once.
			if got.Received < 3*testOrders || got.DuplicatesReceived == 0 {
				t.Errorf("want at least %d deliveries and some duplicates:\n%s", 3*testOrders, text)
			}
			if done := fmt.Sprintf("%d of %d orders paid", testOrders, testOrders); !strings.Contains(lastLine(status.String()), done) {
				t.Errorf("the progress ends without %q:\n%s", done, &status)
			}
			if !bothKilled.MatchString(text) {
				t.Errorf("want both components to have been killed:\n%s", text)
			}
			if got.Seconds < lease.Seconds() {
				t.Errorf("the killed relay's successor cannot be done within the lease of %s:\n%s", lease, text)
			}
		})
	}
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndex(text, "\n")+1:]
}

// TestEffectsAreCounted breaks the tables by hand: what is lost or double must show.
func TestEffectsAreCounted(t *testing.T) {
	t.Parallel()
	db, err := exampledb.Create(t.Context(), testenv.EmptyDatabase(t).URL, tables)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := db.Drop(); err != nil {
			t.Error(err)
		}
	})
	order := func(id string, payments, placed, paid, taken int) string {
		statements := "insert into orders (id, sku, quantity) values ('" + id + "', 'sku-0', 1);"
		statements += strings.Repeat("insert into payments (order_id) values ('"+id+"');", payments)
		statements += strings.Repeat("insert into timeline (order_id, event) values ('"+id+"', 'orders.placed');", placed)
		statements += strings.Repeat("insert into timeline (order_id, event) values ('"+id+"', 'orders.paid');", paid)
		statements += strings.Repeat("update stock set available = available - 1 where sku = 'sku-0';", taken)
		return statements
	}
	for _, step := range []struct {
		name         string
		statements   string
		lost, double int
	}{
		{"well", order("a", 1, 1, 1, 1), 0, 0},
		{"not paid", order("b", 0, 1, 1, 1), 1, 0},
		{"paid three times", order("c", 3, 1, 1, 1), 1, 2},
		{"event missing", order("d", 1, 0, 1, 1), 2, 2},
		{"event twice", order("e", 1, 1, 2, 1), 2, 3},
		{"stock not taken", order("f", 1, 1, 1, 0), 3, 3},
		{"one taken in place of another", order("g", 1, 1, 1, 0) + "update stock set available = available - 1 where sku = 'sku-1';", 4, 4},
	} {
		if _, err := db.Exec(t.Context(), step.statements); err != nil {
			t.Fatal(err)
		}
		d := &demo{db: db, tally: newTally(), components: newSupervisor(nil, nil)}
		if err := db.QueryRow(t.Context(), "select count(*) from orders").Scan(&d.cfg.Orders); err != nil {
			t.Fatal(err)
		}
		r, err := d.report(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if r.Lost != step.lost || r.DoubleEffects != step.double {
			t.Errorf("after %q: lost %d, double %d; want %d, %d", step.name, r.Lost, r.DoubleEffects, step.lost, step.double)
		}
	}
}
