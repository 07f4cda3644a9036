package scheduler

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/schema"
)

// CleanupConfig sets up a [Cleanup]. The zero value is usable; a zero field means its default. How long inbox rows are kept is
// not here, but in the policy of their consumer, so that every replica and every program does the same.
type CleanupConfig struct {
	Schema string // where the tables are; default "commitbox"

	// Discarded is how long outgoing messages are kept that an operator has discarded, for audits. Default 30 days.
	Discarded time.Duration

	// Completers bring back the expired leases of a consumer, usually with inbox.Resume, and return how many runs went
	// well. They are called at the start of a run, one after the other, and have Budget in all; one that
	// fails, panics or does not return keeps nothing from being removed. The leases of a consumer
	// without one are counted and logged.
	Completers map[string]func(ctx context.Context) (resumed int, err error)

	// Budget is how long a run removes rows; what is left is for the next one. A run does at least one batch that fits into
	// the timeouts, however short it is. Default 5 min, at most a day.
	Budget time.Duration
	// Batch is how many rows one transaction removes at most. Default 1000, at most 100 000. It is a limit: batches begin with 100,
	// and are made smaller, down to one row, when one takes longer than 25 ms or runs into a timeout, or else larger.
	Batch int
	// Pause is the wait between two batches. Default 20 ms.
	Pause time.Duration
	// StatementTimeout and LockTimeout bound each batch in the server, whatever its role's settings are. Defaults 2 s and
	// 100 ms, at most a day.
	StatementTimeout, LockTimeout time.Duration

	Observer commitbox.Observer // default: commitbox.Discard
	Logger   *slog.Logger       // default: slog.Default()
}

func (c *CleanupConfig) fill() {
	fill(&c.Discarded, 30*24*time.Hour)
	fill(&c.Budget, 5*time.Minute)
	fill(&c.Batch, 1000)
	fill(&c.Pause, 20*time.Millisecond)
	fill(&c.StatementTimeout, 2*time.Second)
	fill(&c.LockTimeout, 100*time.Millisecond)
	if c.Observer == nil {
		c.Observer = commitbox.Discard
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	c.Observer = careful{c.Observer, c.Logger}
}

func fill[T comparable](field *T, standard T) {
	if *field == *new(T) {
		*field = standard
	}
}

func (c *CleanupConfig) check() error {
	var errs []error
	refuse := func(bad bool, field, problem string) {
		if bad {
			errs = append(errs, &commitbox.InputError{Field: "CleanupConfig." + field, Problem: problem})
		}
	}
	if _, err := schema.Parse(c.Schema); err != nil {
		refuse(true, "Schema", err.Error())
	}
	refuse(c.Discarded < 0, "Discarded", "is negative")
	for consumer, completer := range c.Completers {
		refuse(consumer == "", "Completers", "has an empty consumer")
		refuse(completer == nil, "Completers", "has a nil function")
	}
	refuse(c.Budget < 0, "Budget", "is negative")
	refuse(c.Batch < 1 || c.Batch > 100_000, "Batch", "must be 1 to 100000")
	refuse(c.Pause < 0, "Pause", "is negative")
	refuse(c.StatementTimeout < time.Millisecond, "StatementTimeout", "is shorter than 1 ms")
	refuse(c.LockTimeout < time.Millisecond, "LockTimeout", "is shorter than 1 ms")
	const day = 24 * time.Hour // the server counts in milliseconds that fit into 32 bits
	refuse(c.Budget > day, "Budget", "is longer than a day")
	refuse(c.StatementTimeout > day, "StatementTimeout", "is longer than a day")
	refuse(c.LockTimeout > day, "LockTimeout", "is longer than a day")
	return errors.Join(errs...)
}
