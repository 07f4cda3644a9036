package inbox

import (
	"errors"
	"fmt"
	"time"
)

// What an [*Error] stands for; match with errors.Is.
var (
	ErrInProgress      = errors.New("another worker holds the message")
	ErrFailed          = errors.New("the handler failed")
	ErrNotDue          = errors.New("the next attempt is not due")
	ErrPayloadMismatch = errors.New("the message id was used before with another payload")
	ErrDead            = errors.New("the message was given up")
	ErrUnavailable     = errors.New("the store is not available")
	ErrOutcomeUnknown  = errors.New("the answer to COMMIT is lost")

	// ErrNoResult says that the message is completed, but its row holds no result that fits the asked type.
	ErrNoResult = errors.New("the stored result is missing or cannot be read")
	// ErrNested says that a handler asked for the message that it is handling.
	ErrNested = errors.New("the message is being handled by this call's caller")
	// ErrTxEnded says that the handler ended the transaction it was given. Half of its work may be committed, so a
	// person has to look: the message is dead-lettered and its row left as it is.
	ErrTxEnded = errors.New("the handler ended the transaction")
	// ErrTxOwned is what Commit and Rollback of a transaction answer that belongs to this package: it ends when the
	// handler returns.
	ErrTxOwned = errors.New("the transaction ends when the handler returns and not before")
	// ErrLeaseLost says that another worker took the lease over; nothing was written.
	ErrLeaseLost = errors.New("the lease is lost")
)

var outcomeErrors = [outcomes]error{
	InProgress: ErrInProgress, Failed: ErrFailed, NotDue: ErrNotDue, Mismatch: ErrPayloadMismatch,
	Dead: ErrDead, Unavailable: ErrUnavailable, Unknown: ErrOutcomeUnknown,
}

// Error says why a message was not handled. It matches the sentinel of its outcome and whatever Err matches.
type Error struct {
	ID          ID
	Outcome     Outcome
	RetryAfter  time.Duration // how long to wait before the next delivery; 0: nothing is known
	Attempt     int           // recorded attempts including this one; 0 if unknown
	PayloadKept bool          // the dead row holds the payload, so no broker has to keep it
	Err         error         // the cause: the handler's error, PostgreSQL's answer; may be nil

	seen *int64 // the epoch that the attempt saw, for RecordFailure
}

func (e *Error) Error() string {
	text := fmt.Sprintf("inbox: message %q of consumer %q: %s", e.ID.Message, e.ID.Consumer, e.reason())
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

func (e *Error) reason() string {
	switch e.Outcome {
	case Executed, Replayed:
		return "completed"
	case Failed:
		return fmt.Sprintf("attempt %d failed, next in %s", e.Attempt, e.RetryAfter.Round(time.Millisecond))
	case NotDue:
		return fmt.Sprintf("next attempt in %s", e.RetryAfter.Round(time.Millisecond))
	case Dead:
		return fmt.Sprintf("given up after %d attempts, requeue it to run it again", e.Attempt)
	case Unavailable:
		return "nothing was recorded, deliver it again"
	}
	return outcomeErrors[e.Outcome].Error()
}

// Is says whether target is the sentinel of the outcome.
func (e *Error) Is(target error) bool {
	return int(e.Outcome) < outcomes && outcomeErrors[e.Outcome] != nil && target == outcomeErrors[e.Outcome]
}

func (e *Error) Unwrap() error { return e.Err }

// PanicError is what a handler's panic becomes in [Process]. It counts as a failed attempt. Not promised: that every
// panic is seen here: Handle lets it go on to the caller.
type PanicError struct {
	Value any
	Stack []byte
}

func (e *PanicError) Error() string { return fmt.Sprintf("the handler panicked: %v", e.Value) }

// Unwrap returns the value of the panic if it is an error.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// Permanent marks a handler's error as one that no further attempt can mend: the message is given up at once. Not
// promised: that it stays so, for an operator can requeue it; and it has no meaning outside a handler's return.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ err error }

func (e *permanentError) Error() string { return e.err.Error() }
func (e *permanentError) Unwrap() error { return e.err }
