package inbox

import (
	"errors"
	"slices"
	"time"

	"github.com/commitbox/commitbox"
)

// Verdict is what a consumer does with a delivery at the broker.
type Verdict uint8

const (
	Ack        Verdict = iota // done, or recorded where an operator finds it with its payload
	Retry                     // deliver it again, after Action.After
	DeadLetter                // put it where a person looks; it must not be lost and must not be delivered again
)

var verdictNames = [...]string{"ack", "retry", "dead_letter"}

// String returns the verdict as it stands in metrics.
func (v Verdict) String() string {
	if int(v) < len(verdictNames) {
		return verdictNames[v]
	}
	return "invalid"
}

// Action is a verdict and, for Retry, how long the delivery should wait.
type Action struct {
	Verdict Verdict
	After   time.Duration
}

// retryDefault is the wait where nothing is known about when a retry can succeed.
const retryDefault = time.Second

// Disposition says what a consumer does with a delivery whose handling ended with err, the error of [Handle] or
// [Process]. Every consumer follows it. An ack after Handle presumes that the transaction committed.
//
// A nil error is acked. A message in progress is never acked. A dead one is dead-lettered at the broker, unless its row
// holds the payload. Of errors of several messages in one chain, where a handler handles another message, the outermost
// decides. An error that this package does not know is retried: it is the caller's, and nothing says that the
// message was handled.
//
// Not promised: an end of the retries, for errors that leave no attempt in the row: the broker's own limit bounds those.
// And nothing is sent: a verdict is kept by who settles the delivery.
func Disposition(err error) Action {
	if err == nil {
		return Action{Verdict: Ack}
	}
	var e *Error
	if errors.As(err, &e) {
		return e.disposition()
	}
	var input *commitbox.InputError
	if errors.As(err, &input) || errors.Is(err, ErrTxEnded) {
		return Action{Verdict: DeadLetter}
	}
	return Action{Verdict: Retry, After: retryDefault}
}

func (e *Error) disposition() Action {
	if endedTx(e, e.ID) {
		return Action{Verdict: DeadLetter}
	}
	switch e.Outcome {
	case Executed, Replayed:
		return Action{Verdict: Ack}
	case Mismatch:
		return Action{Verdict: DeadLetter}
	case Dead:
		if e.PayloadKept {
			return Action{Verdict: Ack}
		}
		return Action{Verdict: DeadLetter}
	}
	if e.RetryAfter > 0 {
		return Action{Verdict: Retry, After: e.RetryAfter}
	}
	return Action{Verdict: Retry, After: retryDefault}
}

// Retryable says whether the same message may succeed when it is delivered again: it is in progress, failed with
// attempts left, not due, or the store or its answer was missing. A serialization failure or a deadlock that PostgreSQL
// reported to the caller of [Handle], such as at COMMIT, is retryable as well: begin a new transaction and call Handle
// again. Not promised: that it will succeed, or that nothing was committed: after ErrOutcomeUnknown only the same id is
// safe to use again.
func Retryable(err error) bool {
	var e *Error
	if errors.As(err, &e) {
		return e.disposition().Verdict == Retry
	}
	return transient(err)
}

// endedTx says that the handler of this message ended its transaction, and not only that of another message which it
// handled in turn.
//
//nolint:errorlint // every error of the tree is looked at by itself
func endedTx(err error, id ID) bool {
	if e, ok := err.(*Error); err == nil || ok && e.ID != id {
		return false
	}
	if err == ErrTxEnded {
		return true
	}
	switch wrapper := err.(type) {
	case interface{ Unwrap() error }:
		return endedTx(wrapper.Unwrap(), id)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(wrapper.Unwrap(), func(err error) bool { return endedTx(err, id) })
	}
	return false
}
