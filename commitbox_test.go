package commitbox_test

import (
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

// TestExample runs the example of the README: one order, its message delivered twice, one payment.
func TestExample(t *testing.T) {
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), `create table orders (id text); create table payments (order_id text)`); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DATABASE_URL", db.URL)
	Example()
	var orders, payments, left int
	err := db.Pool.QueryRow(t.Context(), `select (select count(*) from orders), (select count(*) from payments),
		(select count(*) from commitbox.outbox_message)`).Scan(&orders, &payments, &left)
	if err != nil {
		t.Fatal(err)
	}
	if orders != 1 || payments != 1 || left != 0 {
		t.Errorf("%d orders, %d payments, %d messages left; want 1, 1, 0", orders, payments, left)
	}
}
