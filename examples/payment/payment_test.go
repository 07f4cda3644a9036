package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/examples/payment/saga"
	"github.com/commitbox/commitbox/internal/testenv"
)

// TestA5_Payment kills workers at points of the saga while the payment service loses answers, and then the shop with its relay.
// COMMITBOX_SOAK=1 takes every point.
func TestA5_Payment(t *testing.T) {
	t.Parallel()
	cfg := config{DatabaseURL: testenv.EmptyDatabase(t).URL, AMQPURL: testenv.RabbitMQ(t), Kills: 12}
	if os.Getenv("COMMITBOX_SOAK") != "" {
		cfg.Kills = 0
	}
	var out bytes.Buffer
	if err := run(t.Context(), cfg, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{"after POST /charges", "after POST /refunds", "done, then no answer in time", "the shop and its relay"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the run has no %q:\n%s", want, &out)
		}
	}
	t.Logf("\n%s", &out)
}

// TestA5_TheCompleterNeedsNoBroker kills a worker behind the charge, throws its message away at the broker, and lets a worker
// without a broker end the order.
func TestA5_TheCompleterNeedsNoBroker(t *testing.T) {
	t.Parallel()
	d := opened(t)
	if err := d.buy(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	w, err := d.worker(workerName, "after POST /charges")
	if err != nil {
		t.Fatal(err)
	}
	<-w.gone
	err = d.queues.do(func(ch *amqp.Channel) error {
		for purged := 0; purged == 0; { // the broker puts it back when it has noticed the death
			if purged, err = ch.QueuePurge(d.queues.name+queueOrders, false); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	completer, err := d.worker(completerName, "")
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(d.allEnded(t.Context()), completer.stop()); err != nil {
		t.Fatal(err)
	}
	wantRight(t, d)
}

// TestA5_AWorkerThatWasBelievedDead stops a worker in the middle of an order, once inside a transaction, lets another one end
// the order, and wakes it up: it goes on, and changes nothing.
func TestA5_AWorkerThatWasBelievedDead(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"before POST /charges", "before InboxStepStore deduct", "before EnqueueOne"} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			d := opened(t)
			if err := d.buy(t.Context(), 0); err != nil {
				t.Fatal(err)
			}
			w, err := d.worker(workerName, stopAt+point)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(w.kill)
			tooLate := time.After(30 * time.Second)
			for len(w.told(lineKilled)) == 0 {
				select {
				case <-tooLate:
					t.Fatal("the worker never came to that point")
				case <-time.After(10 * time.Millisecond):
				case <-w.gone:
					t.Fatalf("the worker ended: %v", w.result)
				}
			}
			if err := d.settle(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := w.cmd.Process.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Second) // for what it might do
			if err := w.stop(); err != nil {
				t.Error(err)
			}
			wantRight(t, d)
		})
	}
}

// opened is a demonstration in which nothing happens yet.
func opened(t *testing.T) *demo {
	t.Helper()
	d, err := open(t.Context(), config{DatabaseURL: testenv.EmptyDatabase(t).URL, AMQPURL: testenv.RabbitMQ(t)}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// wantRight asserts that everything was done once, by workers that had to take over from others.
func wantRight(t *testing.T, d *demo) {
	t.Helper()
	r, err := d.report(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := r.verdict(); err != nil {
		t.Error(err)
	}
	if r.resumed == 0 {
		t.Error("each order needed one attempt only, so nobody took over")
	}
}

// TestWhatIsWrongShows gives the count what must never happen.
func TestWhatIsWrongShows(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		end, status      string
		charges, refunds []int
		good             bool
	}{
		{saga.Confirmed, saga.Confirmed, []int{5}, nil, true},
		{saga.Confirmed, saga.Confirmed, []int{5, 5}, nil, false},
		{saga.Confirmed, saga.Confirmed, []int{4}, nil, false},
		{saga.Confirmed, saga.Confirmed, nil, nil, false},
		{saga.Confirmed, "open", []int{5}, nil, false},
		{saga.Refunded, saga.Refunded, []int{5}, []int{5}, true},
		{saga.Refunded, saga.Refunded, []int{5}, []int{5, 5}, false},
		{saga.Refunded, saga.Refunded, []int{5}, nil, false},
		{saga.Declined, saga.Declined, nil, nil, true},
		{saga.Refused, saga.Refused, []int{5}, nil, false},
	} {
		r := &report{}
		r.check(purchase{id: "o", end: c.end, amount: 5}, c.status, c.charges, c.refunds)
		if (r.verdict() == nil) != c.good {
			t.Errorf("%+v: %v", c, r.verdict())
		}
	}
}

func TestConfigFromEnv(t *testing.T) {
	for text, good := range map[string]bool{"": true, "0": true, "7": true, "-1": false, "many": false} {
		t.Setenv("DATABASE_URL", "db")
		t.Setenv("AMQP_URL", "mq")
		t.Setenv("KILLS", text)
		if _, err := configFromEnv(); (err == nil) != good {
			t.Errorf("KILLS=%s: %v", text, err)
		}
	}
	t.Setenv("AMQP_URL", "")
	if _, err := configFromEnv(); err == nil {
		t.Error("a missing address is no error")
	}
}

func TestPointsAreChosenEvenly(t *testing.T) {
	t.Parallel()
	var points []string
	for i := range 20 {
		points = append(points, fmt.Sprint("point ", i))
	}
	points = append(points, "before POST /charges", "after POST /charges")
	got := choose(points, 6)
	want := []string{"before POST /charges", "after POST /charges", "point 0", "point 5", "point 10", "point 15"}
	if fmt.Sprint(got) != fmt.Sprint(want) || len(choose(points, 0)) != len(points) {
		t.Errorf("chosen: %v", got)
	}
}
