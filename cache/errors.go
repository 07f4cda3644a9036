package cache

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/redis/go-redis/v9"
)

// ErrUnavailable says that Redis could not be asked, or could not do it: no connection, no answer in time, not ready, no
// memory, or not asked because it was away a moment ago. It is the only error to degrade on; any other one (such as a wrong
// password or a missing right) is a fault of the set-up that does not pass by itself.
var ErrUnavailable = errors.New("cache: redis is unavailable")

var (
	errBudget = fmt.Errorf("%w: no answer within the time budget", ErrUnavailable)
	errOpen   = fmt.Errorf("%w: it did not answer before, and is tried again in a while", ErrUnavailable)
)

// fault is what kind of error a call met, as the metrics name it.
type fault string

const (
	noFault      fault = ""
	timedOut     fault = "timeout"       // no answer in time
	disconnected fault = "connection"    // no connection, or it broke
	notReady     fault = "not_ready"     // the server answers that it cannot serve now
	writeRefused fault = "write_refused" // the server serves reads only
	refused      fault = "refused"       // any other answer that is an error
	breakerOpen  fault = "open"          // not asked
	tooLarge     fault = "too_large"     // not sent
)

// away says that the server as a whole does not serve, which is what the breaker counts.
func (f fault) away() bool { return f == timedOut || f == disconnected || f == notReady }

func (f fault) unavailable() bool { return f.away() || f == writeRefused || f == breakerOpen }

// Beginnings of answers.
var (
	answersNotReady = []string{"LOADING", "CLUSTERDOWN", "MASTERDOWN", "TRYAGAIN", "MOVED", "ASK ", "NOREPLICAS", "BUSY ", "max number of clients"}
	answersWrite    = []string{"READONLY", "OOM", "MISCONF"}
)

func classify(err error) fault {
	begins := func(prefix string) bool { return redis.HasErrorPrefix(err, prefix) }
	var answer redis.Error
	var wire net.Error
	switch {
	case err == nil || errors.Is(err, redis.Nil):
		return noFault
	case errors.Is(err, errOpen):
		return breakerOpen
	case errors.Is(err, errBudget), errors.Is(err, context.DeadlineExceeded), errors.Is(err, redis.ErrPoolTimeout):
		return timedOut
	case slices.ContainsFunc(answersNotReady, begins):
		return notReady
	case slices.ContainsFunc(answersWrite, begins):
		return writeRefused
	case errors.As(err, &answer):
		return refused
	case errors.As(err, &wire) && wire.Timeout():
		return timedOut
	}
	return disconnected
}

// explain makes a call's error one that says which class it is of.
func explain(operation string, f fault, err error) error {
	switch {
	case f == noFault:
		return nil
	case errors.Is(err, ErrUnavailable):
		return err
	case f.unavailable():
		return fmt.Errorf("%w: %s: %w", ErrUnavailable, operation, err)
	}
	return fmt.Errorf("cache: %s: %w", operation, err)
}

func wrongType(err error) bool { return redis.HasErrorPrefix(err, "WRONGTYPE") }
