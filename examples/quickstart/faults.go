package main

import (
	"context"
	"hash/fnv"
	"net"
	"sync"
	"time"

	"github.com/commitbox/commitbox/outbox"
)

// duplicator publishes every message one to three times. How often follows from its id.
type duplicator struct {
	next outbox.Publisher
	note journal
}

// Publish implements [outbox.Publisher]. The answer is the first copy's; whether the others arrive does not matter.
func (d *duplicator) Publish(ctx context.Context, batch []outbox.Record) []error {
	answer := d.next.Publish(ctx, batch)
	confirmed := make([]int, len(batch))
	again := make([]int, 0, len(batch)) // indices of confirmed messages that get another copy
	for i, err := range answer {
		if err == nil {
			confirmed[i], again = 1, append(again, i)
		}
	}
	for copies := 2; copies <= 3; copies++ {
		var extra []outbox.Record
		var from []int
		for _, i := range again {
			if copiesOf(batch[i]) >= copies {
				extra, from = append(extra, batch[i]), append(from, i)
			}
		}
		if len(extra) == 0 {
			break
		}
		for i, err := range d.next.Publish(ctx, extra) {
			if err == nil {
				confirmed[from[i]]++
			}
		}
	}
	for _, i := range again {
		d.note(notePublished(batch[i].ID.String(), confirmed[i]))
	}
	return answer
}

func copiesOf(r outbox.Record) int {
	h := fnv.New32a()
	h.Write(r.ID[:])
	return 1 + int(h.Sum32()%3)
}

// fault is one kill and the point of the flow at which it falls.
type fault struct {
	component string
	due       func(counts) bool
}

// faultPlan returns the kills of a run, in order. Two messages belong to an order.
func faultPlan(orders int) []fault {
	return []fault{
		{relayName, func(c counts) bool { return c.Delivered >= orders }},
		{paymentsName, func(c counts) bool { return c.Paid >= orders*8/10 }},
	}
}

// inject kills components as planned and starts them again at once.
func (d *demo) inject(ctx context.Context) error {
	for _, fault := range faultPlan(d.cfg.Orders) {
		err := d.await(ctx, time.Millisecond, func(c counts, _ time.Duration) (bool, error) { return fault.due(c), nil })
		if err != nil {
			return err
		}
		if err := d.components.killAndRestart(fault.component); err != nil {
			return err
		}
		d.progress.say("killed " + fault.component + " and started it again")
	}
	return nil
}

// wire carries the connections of a component that runs inside this process, so that they can be cut.
type wire struct {
	mu    sync.Mutex
	conns []net.Conn
	isCut bool
}

func (w *wire) dial(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.isCut {
		conn.Close()
		return nil, net.ErrClosed
	}
	w.conns = append(w.conns, conn)
	return conn, nil
}

// cut closes every connection, and every one that is still to be opened.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isCut = true
	for _, conn := range w.conns {
		conn.Close()
	}
}
