package outbox

import (
	"time"

	"github.com/commitbox/commitbox/internal/check"
)

// errorMax bounds the error text that is kept with a message, in bytes.
const errorMax = 2048

// policy is what becomes of messages that fail.
type policy struct {
	maxAttempts int
	backoff     func(failures int) time.Duration
	hold        bool // a dead message holds its key
}

// decision is what to do about a batch that was published.
type decision struct {
	confirmed []found
	change    change
	tried     bool  // something was sent
	left      []int // rows that stay where they are
}

// decide turns the verdicts on rows into deletes and changes of state. Nothing counts against a message that was not
// tried or whose destination is away.
func (p policy) decide(rows []row, verdicts []verdict) decision {
	var d decision
	for i := range rows {
		r, v := &rows[i], verdicts[i]
		d.tried = d.tried || v.result != resultNotTried
		switch {
		case v.result == resultOK:
			if d.confirmed == nil {
				d.confirmed = make([]found, 0, len(rows))
			}
			d.confirmed = append(d.confirmed, found{r.ref, r.ID, r.place})
		case v.result == resultPermanent, v.result == resultRetryable && r.Attempt >= p.maxAttempts:
			p.bury(&d.change, r, v.err)
		case v.result == resultRetryable:
			p.postpone(&d.change, r, v.err)
		default:
			p.leave(&d.change, r, v)
			d.left = append(d.left, i)
		}
	}
	return d
}

// leave lets a row stay. One that found the destination away and waits among the deferred ones makes room for others: its
// time moves, and nothing is spent.
func (p policy) leave(c *change, r *row, v verdict) {
	if !r.deferred || v.result != resultUnavailable {
		return
	}
	delay := p.backoff(1)
	if r.Key != "" {
		c.block = append(c.block, blocked{r.keyRef(), delay})
	} else {
		c.failed = append(c.failed, failure{ref: r.ref, delay: delay})
	}
}

// bury makes a row dead. Under policy hold its key waits for an operator; under skip a key that was blocked goes on.
func (p policy) bury(c *change, r *row, err error) {
	c.buried = append(c.buried, failure{ref: r.ref, text: check.Clean(err.Error(), errorMax)})
	switch {
	case r.Key == "":
	case p.hold:
		c.hold = append(c.hold, held{r.keyRef(), r.id})
	case r.deferred:
		c.block = append(c.block, blocked{keyRef: r.keyRef()})
	}
}

// postpone makes a row wait, and its key with it.
func (p policy) postpone(c *change, r *row, err error) {
	delay := p.backoff(r.Attempt)
	f := failure{ref: r.ref, attempts: r.Attempt, text: check.Clean(err.Error(), errorMax), delay: delay}
	if r.deferred {
		c.failed = append(c.failed, f)
	} else {
		c.deferred = append(c.deferred, f)
	}
	if r.Key != "" {
		c.block = append(c.block, blocked{r.keyRef(), delay})
	}
}
