package outbox

import (
	"context"
	"errors"
	"fmt"
)

// Publisher hands messages to a broker. It is called from several goroutines at once, one per lane of the relay.
//
// Publish sends a batch and answers one error per message, in the order of the batch; nil means that the destination
// has confirmed that it holds the message. What is not known counts as not confirmed: a negative answer, a returned
// message, a closed connection, a timeout. The batch holds at most one message per key, so the order in which its
// messages are sent is free; see [KeyOrderer]. The call has to come back when ctx ends; the relay stops itself when it does not. The
// records must not be changed or kept.
//
// An error is read as one of four kinds: made by [Permanent] (the message itself cannot be sent, ever: it becomes dead
// at once), made by [Unavailable] (the destination is away: nothing counts against the message, the relay waits),
// [ErrNotTried] (nothing was sent; nothing counts), and any other (counted, tried again after a growing delay). An
// answer of the wrong length and a panic count as any other error for the whole batch. Not promised: that a message
// comes only once: after any answer but a confirmation that was recorded, and after a relay that died, it comes again
// with the same id.
type Publisher interface {
	Publish(ctx context.Context, batch []Record) []error
}

// KeyOrderer is what a [Publisher] implements that keeps the order of every key within a batch by itself: once a message
// of a key is not confirmed, no later message of that key in the batch is sent. It then gets batches with several
// messages per key, where others get one message per key and call: one busy key runs at batches instead of messages per
// round trip. Package outboxtest tests the property; the method is asked once, when a relay joins. Not promised: that
// a relay notices a publisher that says so and does not do it: messages of a key then overtake one that failed.
type KeyOrderer interface {
	StopsKeyAtFirstFailure() bool
}

// PublishFunc is a Publisher that sends one message at a time. It stops at the first error made by [Unavailable] and
// when ctx ends; the messages after it are not tried. Not promised: speed: a batch takes one call after the other.
type PublishFunc func(ctx context.Context, r Record) error

// Publish implements [Publisher].
func (f PublishFunc) Publish(ctx context.Context, batch []Record) []error {
	errs := make([]error, len(batch))
	for i, r := range batch {
		if ctx.Err() != nil {
			fillNotTried(errs[i:])
			break
		}
		errs[i] = f(ctx, r)
		if kindOf(errs[i]) == resultUnavailable {
			fillNotTried(errs[i+1:])
			break
		}
	}
	return errs
}

func fillNotTried(errs []error) {
	for i := range errs {
		errs[i] = ErrNotTried
	}
}

// ErrNotTried answers for a message that was not sent, such as those behind a connection that broke.
var ErrNotTried = errors.New("outbox: message was not tried")

// Permanent marks an error that no retry can cure, such as a message that the broker refuses for its size. Not
// promised: that the message stays dead, for an operator can requeue it.
func Permanent(err error) error { return &kindError{resultPermanent, err} }

// Unavailable marks an error of the destination as a whole, such as a refused connection. Not promised: that nothing is
// ever counted: a message that finds the destination away while others get through has a failure of its own.
func Unavailable(err error) error { return &kindError{resultUnavailable, err} }

// IsUnavailable says whether err was made by [Unavailable].
func IsUnavailable(err error) bool { return kindOf(err) == resultUnavailable }

// result is what became of one message in a Publish call.
type result uint8

const (
	resultOK result = iota
	resultRetryable
	resultPermanent
	resultUnavailable
	resultNotTried
)

// String returns the result as it stands in metrics.
func (r result) String() string {
	return [...]string{"ok", "retryable", "permanent", "unavailable", "not_tried"}[r]
}

type kindError struct {
	kind result
	err  error
}

func (e *kindError) Error() string {
	return fmt.Sprintf("%s: %v", e.kind, e.err)
}

func (e *kindError) Unwrap() error { return e.err }

func kindOf(err error) result {
	if err == nil {
		return resultOK
	}
	if kind := (*kindError)(nil); errors.As(err, &kind) {
		return kind.kind
	}
	if errors.Is(err, ErrNotTried) {
		return resultNotTried
	}
	return resultRetryable
}
