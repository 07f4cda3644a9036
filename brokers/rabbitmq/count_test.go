package rabbitmq

import (
	"math"
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestDeliveriesCounted(t *testing.T) {
	t.Parallel()
	deaths := func(queue string, counts ...int64) (entries []any) {
		for _, n := range counts {
			entries = append(entries, amqp.Table{"queue": queue, "count": n})
		}
		return entries
	}
	for name, c := range map[string]struct {
		d    amqp.Delivery
		want int
	}{
		"first":                       {amqp.Delivery{}, 1},
		"redelivered, nobody counts":  {amqp.Delivery{Redelivered: true}, 0},
		"quorum queue":                {amqp.Delivery{Redelivered: true, Headers: amqp.Table{"x-delivery-count": int64(3)}}, 4},
		"dead-lettered":               {amqp.Delivery{Headers: amqp.Table{"x-death": deaths("q", 2)}}, 3},
		"dead-lettered, redelivered":  {amqp.Delivery{Redelivered: true, Headers: amqp.Table{"x-death": deaths("q", 2)}}, 3},
		"dead-lettered elsewhere":     {amqp.Delivery{Headers: amqp.Table{"x-death": deaths("elsewhere", 1e9)}}, 1},
		"a round through both queues": {amqp.Delivery{Headers: amqp.Table{"x-death": append(deaths("retry", 2), deaths("q", 2)...)}}, 3},
		"moved by us":                 {amqp.Delivery{Headers: amqp.Table{HeaderDeliveries: int64(5), "x-death": deaths("retry", 1)}}, 6},
		"moved by us, none used":      {amqp.Delivery{Headers: amqp.Table{HeaderDeliveries: int64(0), "x-death": deaths("retry", 1)}}, 1},
		"claims to be moved by us":    {amqp.Delivery{Headers: amqp.Table{HeaderDeliveries: int64(1e9)}}, 1},
		"largest count":               {amqp.Delivery{Headers: amqp.Table{HeaderDeliveries: int64(math.MaxInt64), "x-death": deaths("retry", 1)}}, countMax + 1},
		"sum over the largest count":  {amqp.Delivery{Headers: amqp.Table{"x-death": deaths("q", math.MaxInt64, 5)}}, countMax + 1},
		"nonsense":                    {amqp.Delivery{Headers: amqp.Table{"x-delivery-count": "many", "x-death": "x"}}, 1},
		"negative":                    {amqp.Delivery{Headers: amqp.Table{"x-delivery-count": int64(-9)}}, 1},
	} {
		cfg := ConsumerConfig{Queue: "q", RetryQueue: "retry"}
		if got := cfg.deliveries(c.d); got != c.want {
			t.Errorf("%s: %d, want %d", name, got, c.want)
		}
	}
}

func TestDeliveriesUsed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		delivery int
		cause    error
		want     int
	}{
		{3, &inbox.Error{Outcome: inbox.Failed}, 3},
		{3, errExited, 3},
		{3, &inbox.Error{Outcome: inbox.Failed, Err: inbox.ErrUnavailable}, 3},
		{0, errExited, 1},
		{3, &inbox.Error{Outcome: inbox.Unavailable}, 2},
		{3, &inbox.Error{Outcome: inbox.InProgress}, 2},
		{3, &inbox.Error{Outcome: inbox.NotDue}, 2},
		{3, &inbox.Error{Outcome: inbox.Unknown}, 2},
		{0, &inbox.Error{Outcome: inbox.NotDue}, 0},
	} {
		d := Delivery{Message: inbox.Message{Delivery: c.delivery}}
		if got := d.used(c.cause); got != c.want {
			t.Errorf("delivery %d, %v: used %d, want %d", c.delivery, c.cause, got, c.want)
		}
	}
}

// Counts that a publisher made up or that another queue left do not keep a message from being handled.
func TestForgedCountsDoNotBury(t *testing.T) {
	t.Parallel()
	url, s := testenv.RabbitMQ(t), newShop(t)
	b := dialBroker(t, url)
	queue, dead := b.queue(nil), b.queue(nil)
	death := func(n int64) []any { return []any{amqp.Table{"count": n, "queue": "elsewhere"}} }
	for id, headers := range map[string]amqp.Table{
		"own": {HeaderDeliveries: int64(1e9)}, "largest": {HeaderDeliveries: int64(math.MaxInt64)},
		"death": {"x-death": death(1e9)}, "sum": {"x-death": append(death(math.MaxInt64), death(5)...)},
	} {
		b.send(queue, amqp.Publishing{MessageId: id, Headers: headers})
	}
	stop := s.consume(ConsumerConfig{URL: url, Queue: queue, DeadLetterQueue: dead, RetryQueue: b.retryQueue(queue)}, s.record)
	eventually(t, "all settled", func() bool { n := s.settlements(); return n[settledAck]+n[settledDeadLetter] == 4 })
	mustStop(t, stop)
	if n := s.effects(); n != 4 {
		t.Errorf("%d of 4 messages were handled: %v", n, s.settlements())
	}
}
