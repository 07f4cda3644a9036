package main

import (
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/commitbox/commitbox/inbox"
)

// journal takes one line for each thing that happened in a component. A child process writes the lines to its standard
// output, so that what happened before it was killed still arrives.
type journal func(line string)

func notePublished(messageID string, copies int) string {
	return fmt.Sprintf("published %s %d", messageID, copies)
}

func noteReceived(consumer, outcome string) string {
	return fmt.Sprintf("received %s %s", consumer, outcome)
}

// tally adds up the journals of all components.
type tally struct {
	mu        sync.Mutex
	published map[string]bool // ids of messages that the broker confirmed
	copies    int             // confirmed publishes, extra copies among them
	received  int             // deliveries that reached an inbox
	executed  map[string]int  // by consumer: deliveries whose handler ran and committed
	replayed  int             // deliveries that the inbox knew already
}

func newTally() *tally {
	return &tally{published: map[string]bool{}, executed: map[string]int{}}
}

// note is a [journal].
func (t *tally) note(line string) {
	words := strings.Fields(line)
	if len(words) != 3 {
		return // the last line of a process that was killed while it wrote
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch words[0] {
	case "published":
		copies, _ := strconv.Atoi(words[2])
		t.published[words[1]] = true
		t.copies += copies
	case "received":
		t.received++
		switch words[2] {
		case inbox.Executed.String():
			t.executed[words[1]]++
		case inbox.Replayed.String():
			t.replayed++
		}
	}
}

// counts is what a tally holds at one moment.
type counts struct {
	Delivered  int // messages that the broker confirmed
	Copies     int // confirmed publishes
	Received   int // deliveries that reached an inbox
	Duplicates int // deliveries that the inbox knew already
	Paid       int // payments that were committed
}

func (t *tally) counts() counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	return counts{
		Delivered: len(t.published), Copies: t.copies, Received: t.received,
		Duplicates: t.replayed, Paid: t.executed[paymentsName],
	}
}
