// Package provider stands for a payment service that somebody else runs. It keeps the promise that such services make, one
// charge for a key, and breaks everything that they do not promise.
package provider

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"sync"
	"time"
)

// declineFrom is the amount in cents from which a card has no cover.
const declineFrom = 100_000

// Entry is one movement of money.
type Entry struct {
	OrderID string `json:"order_id"`
	Amount  int    `json:"amount"` // negative: given back
}

// Ledger is what the service has done, and what it has been through. GET /ledger answers it.
type Ledger struct {
	Entries []Entry        `json:"entries"`
	Calls   int            `json:"calls"`
	Faults  map[string]int `json:"faults"`
}

// Service is the payment service. Its zero value is a service without faults.
type Service struct {
	Faults bool          // injects them
	Hang   time.Duration // how long an answer hangs that does not come

	mu      sync.Mutex
	ledger  Ledger
	answers map[string]answer // by key; a real service keeps them for a day or so
	amounts map[string]int    // by charge
}

type answer struct {
	status int
	body   map[string]string
}

// request is a charge or a refund.
type request struct {
	OrderID  string `json:"order_id"`
	Amount   int    `json:"amount"`
	ChargeID string `json:"charge_id"`
}

// fault is what happens around a call. The money moves in between, or does not.
type fault struct {
	name       string
	lost       bool // the call does nothing
	afterwards func(s *Service, w http.ResponseWriter, r *http.Request) (answered bool)
}

var faults = []fault{
	{name: "500 before anything", lost: true, afterwards: fail},
	{},
	{name: "done, then no answer in time", afterwards: hang},
	{},
	{name: "done, then 500", afterwards: fail},
	{},
	{name: "slow answer", afterwards: slow},
	{},
	{name: "done, then the connection breaks", afterwards: breakOff},
	{},
	{},
}

func fail(_ *Service, w http.ResponseWriter, _ *http.Request) bool {
	http.Error(w, "internal error", http.StatusInternalServerError)
	return true
}

func slow(_ *Service, _ http.ResponseWriter, _ *http.Request) bool {
	time.Sleep(200 * time.Millisecond)
	return false
}

func hang(s *Service, w http.ResponseWriter, r *http.Request) bool {
	select {
	case <-r.Context().Done():
	case <-time.After(s.Hang):
	}
	return breakOff(s, w, r)
}

func breakOff(*Service, http.ResponseWriter, *http.Request) bool { panic(http.ErrAbortHandler) }

// ServeHTTP implements [http.Handler].
func (s *Service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == "/ledger" {
		_ = json.NewEncoder(w).Encode(s.Snapshot()) // who is gone asks again
		return
	}
	var q request
	key := r.Header.Get("Idempotency-Key")
	if err := json.NewDecoder(r.Body).Decode(&q); err != nil || key == "" {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	f := s.next()
	var a answer
	if !f.lost {
		a = s.once(key, func() answer { return s.move(r.URL.Path, q) })
	}
	if f.afterwards != nil && f.afterwards(s, w, r) {
		return
	}
	w.WriteHeader(a.status)
	_ = json.NewEncoder(w).Encode(a.body)
}

// Snapshot returns the ledger as it is now.
func (s *Service) Snapshot() Ledger {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := s.ledger
	l.Entries, l.Faults = slices.Clone(l.Entries), maps.Clone(l.Faults)
	return l
}

// next returns the fault of the call.
func (s *Service) next() fault {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ledger.Calls++
	if !s.Faults {
		return fault{}
	}
	f := faults[s.ledger.Calls%len(faults)]
	if f.name != "" {
		if s.ledger.Faults == nil {
			s.ledger.Faults = map[string]int{}
		}
		s.ledger.Faults[f.name]++
	}
	return f
}

// once does what a key asks for, the first time.
func (s *Service) once(key string, do func() answer) answer {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.answers == nil {
		s.answers, s.amounts = map[string]answer{}, map[string]int{}
	}
	if _, known := s.answers[key]; !known {
		s.answers[key] = do()
	}
	return s.answers[key]
}

// move moves money. It does not care whether it has done so before: that is what keys are for.
func (s *Service) move(path string, q request) answer {
	id := fmt.Sprintf("%d", len(s.ledger.Entries)+1)
	switch {
	case path == "/charges" && q.Amount >= declineFrom:
		return answer{http.StatusPaymentRequired, map[string]string{"error": "declined"}}
	case path == "/charges" && q.Amount > 0:
		s.ledger.Entries = append(s.ledger.Entries, Entry{q.OrderID, q.Amount})
		s.amounts["ch_"+id] = q.Amount
		return answer{http.StatusCreated, map[string]string{"id": "ch_" + id}}
	case path == "/refunds" && s.amounts[q.ChargeID] > 0:
		s.ledger.Entries = append(s.ledger.Entries, Entry{q.OrderID, -s.amounts[q.ChargeID]})
		return answer{http.StatusCreated, map[string]string{"id": "re_" + id}}
	}
	return answer{http.StatusNotFound, map[string]string{"error": "nothing to do"}}
}
