// Package outboxtest proves that a publisher keeps the contract of [outbox.Publisher].
//
// A publisher that says "confirmed" too early loses messages, and no test of the happy path shows it. The suite drives a
// publisher against its broker, real or not, through refusals at every position of a batch, an absent and a silent
// destination, an ended context and concurrent use, and compares what it answers with what the destination holds.
package outboxtest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/commitbox/commitbox/outbox"
)

// Subject is a publisher with its destination. The suite makes a new one for every check.
type Subject struct {
	Publisher outbox.Publisher

	// Received lists what the destination holds, in the order in which it took it, copies included. ID, Topic, Key,
	// ContentType, Headers and Payload are compared; a field that the destination cannot hold is left out by OmitFields.
	Received   func() []outbox.Record
	OmitFields []string

	// What the destination can be made to do wrong. A nil function leaves out the checks that need it, visibly.
	Refuse func(refused func(outbox.Record) bool) // it says no to these messages from now on
	Away   func(away bool)                        // it cannot be reached
	Silent func(silent bool)                      // it can be reached and does not answer

	// Timeout is how long one call may take when nothing is wrong; default 10 s.
	Timeout time.Duration
}

// TestPublisher runs the suite. newSubject makes a subject whose destination is empty; it cleans up through t. Not
// promised: that a destination which is not the real one behaves like it, and what happens between the checks, such as
// a crash of the broker.
func TestPublisher(t *testing.T, newSubject func(t *testing.T) Subject) {
	for _, c := range checks {
		t.Run(c.name, func(t *testing.T) {
			s := newSubject(t)
			if s.Timeout == 0 {
				s.Timeout = 10 * time.Second
			}
			if missing := c.missing(s); missing != "" {
				t.Skipf("the subject has no %s: this part of the contract is not proved", missing)
			}
			if err := c.run(s); err != nil {
				t.Error(err)
			}
		})
	}
}

// check is one part of the contract.
type check struct {
	name  string
	needs []string
	run   func(Subject) error
}

var checks = []check{
	{"confirmed messages are held as given", nil, holdsWhatItConfirmed},
	{"an empty batch", nil, takesEmptyBatch},
	{"messages of one key arrive in order of the calls", nil, keepsOrderOfCalls},
	{"concurrent calls", nil, worksConcurrently},
	{"an ended context", nil, obeysEndedContext},
	{"a refusal at each position", []string{"Refuse"}, reportsRefusals},
	{"a key is stopped at its first failure, if that is declared", []string{"Refuse"}, stopsKey},
	{"a destination that is away, and back", []string{"Away"}, reportsAbsence},
	{"a destination that does not answer", []string{"Silent"}, givesUpOnSilence},
}

// missing names what the check needs and the subject does not have.
func (c check) missing(s Subject) string {
	has := map[string]bool{"Refuse": s.Refuse != nil, "Away": s.Away != nil, "Silent": s.Silent != nil}
	for _, need := range c.needs {
		if !has[need] {
			return need
		}
	}
	return ""
}

// publish calls the publisher, and checks what holds for every call: it comes back, with one answer per message, and
// nothing is called confirmed that the destination does not hold.
func (s Subject) publish(ctx context.Context, batch []outbox.Record) ([]error, error) {
	before := fmt.Sprintf("%+v", batch)
	answer := make(chan []error, 1)
	go func() { answer <- s.Publisher.Publish(ctx, batch) }()
	grace := time.After(s.Timeout + 5*time.Second)
	select {
	case errs := <-answer:
		if len(errs) != len(batch) {
			return nil, fmt.Errorf("%d answers for %d messages", len(errs), len(batch))
		}
		if after := fmt.Sprintf("%+v", batch); after != before {
			return nil, fmt.Errorf("the records were changed:\nbefore %s\nafter  %s", before, after)
		}
		return errs, s.heldIfConfirmed(batch, errs)
	case <-grace:
		return nil, fmt.Errorf("Publish of %d messages did not come back %v after its context had ended", len(batch), 5*time.Second)
	}
}

func (s Subject) heldIfConfirmed(batch []outbox.Record, errs []error) error {
	held := s.received()
	for i, r := range batch {
		if errs[i] == nil && len(held[r.ID.String()]) == 0 {
			return fmt.Errorf("message %d of %d was confirmed, and the destination does not hold it", i+1, len(batch))
		}
	}
	return nil
}

// received groups what the destination holds by id.
func (s Subject) received() map[string][]outbox.Record {
	held := make(map[string][]outbox.Record)
	for _, r := range s.Received() {
		held[r.ID.String()] = append(held[r.ID.String()], r)
	}
	return held
}

// deadline is the context of a call.
func (s Subject) deadline() (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.Background(), s.Timeout)
}
