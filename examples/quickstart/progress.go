package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// progress writes how far a run is: one line that changes on a terminal, a line from time to time elsewhere.
type progress struct {
	orders   int
	tally    *tally
	paid     func() (int, error) // counts the orders with a payment
	lastPaid int                 // what it said last, for when the database does not answer
	quit     chan struct{}
	gone     chan struct{}
	terminal bool

	mu sync.Mutex
	w  io.Writer
}

func showProgress(w io.Writer, orders int, t *tally, paid func() (int, error)) *progress {
	p := &progress{
		orders: orders, tally: t, paid: paid,
		quit: make(chan struct{}), gone: make(chan struct{}), terminal: isTerminal(w), w: w,
	}
	go p.run()
	return p
}

func (p *progress) run() {
	defer close(p.gone)
	every, end := 2*time.Second, "\n"
	if p.terminal {
		every, end = 200*time.Millisecond, ""
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-p.quit:
			p.write(p.line() + "\n")
			return
		case <-tick.C:
			p.write(p.line() + end)
		}
	}
}

// say writes a line of its own.
func (p *progress) say(text string) { p.write(text + "\n") }

// stop writes the last state.
func (p *progress) stop() {
	close(p.quit)
	<-p.gone
}

func (p *progress) line() string {
	if n, err := p.paid(); err == nil {
		p.lastPaid = n
	}
	c := p.tally.counts()
	return fmt.Sprintf("%d of %d orders paid, %d messages delivered, %d deliveries received", p.lastPaid, p.orders, c.Delivered, c.Received)
}

func (p *progress) write(text string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.terminal {
		text = "\r\033[K" + text // over the line that changes
	}
	fmt.Fprint(p.w, text)
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}
