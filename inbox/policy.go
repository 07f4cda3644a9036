package inbox

import (
	"errors"
	"time"

	"github.com/commitbox/commitbox"
)

// Mode says what guards the messages of a consumer. The package's documentation has a section for each, with what it does
// not promise.
type Mode string

const (
	ModePostgres Mode = "postgres" // the row
	ModeDouble   Mode = "double"   // a cache is asked first, and the row is always written
	ModeCache    Mode = "cache"    // a token in Redis, and no row
	ModeOff      Mode = "off"      // nothing
)

// Level says what a mode is worth: "exactly-once effect", "strong", "weak" or "none".
func (m Mode) Level() string {
	switch m {
	case ModePostgres:
		return "exactly-once effect"
	case ModeDouble:
		return "strong"
	case ModeCache:
		return "weak"
	}
	return "none"
}

func (m Mode) inTable() bool { return m == ModePostgres || m == ModeDouble }

func (m Mode) known() bool { return m.inTable() || m == ModeCache || m == ModeOff }

// StoreDown says what becomes of a message while a store that has to be asked does not answer.
type StoreDown string

const (
	StoreDownClosed StoreDown = "closed" // ErrUnavailable: it is delivered again
	StoreDownOpen   StoreDown = "open"   // it is handled without that store, and counted
)

// Policy is how the messages of one consumer are guarded. In the database a zero field inherits from the policy of
// [EveryConsumer]; where that is zero as well, the box's own Config counts. What [Policies.Get] and [Policies.List] return
// has everything filled in that the database knows.
type Policy struct {
	Mode      Mode
	StoreDown StoreDown

	Retention     time.Duration // how long completed rows are kept; not shorter than RetryHorizon
	DeadRetention time.Duration // the same for dead ones
	RetryHorizon  time.Duration // how long after its first delivery a message may be delivered again
	AbandonAfter  time.Duration // a failed row that has been due for so long becomes dead

	Lease                   time.Duration // Config.LeaseFor
	MaxAttempts             int           // Config.MaxAttempts
	BackoffBase, BackoffMax time.Duration // the fields of Config
}

// EveryConsumer is the name under which the policy of all consumers stands that have none of their own.
const EveryConsumer = "*"

// Standing is what holds for a consumer now.
type Standing struct {
	Consumer string
	Policy
	Level    string
	FromMode Mode  // the mode before the last change of it; empty: there was none
	Stage    Stage // how far that change is
	Version  int64

	tableLeft, guardLeft time.Duration // how long ago; negative: it is not left, or is not asked any more
}

// check says what a policy that was read cannot mean, such as a mode of a later version of this package.
func (s *Standing) check() error {
	var errs []error
	refuse := func(bad bool, field, problem string) {
		if bad {
			errs = append(errs, &commitbox.InputError{Field: "policy of " + s.Consumer + ": " + field, Problem: problem})
		}
	}
	refuse(!s.Mode.known(), "mode", "is not known")
	refuse(s.StoreDown != StoreDownClosed && s.StoreDown != StoreDownOpen, "store_down", "is not known")
	refuse(s.RetryHorizon <= 0 || s.AbandonAfter <= 0, "retry_horizon, abandon_after", "must be positive")
	refuse(s.Retention < s.RetryHorizon || s.DeadRetention < s.RetryHorizon, "retention", "is shorter than the retry horizon")
	refuse(s.Lease != 0 && s.Lease < time.Second, "lease", "is shorter than 1 s")
	refuse(s.MaxAttempts < 0 || s.MaxAttempts > 1e6, "max_attempts", "must be 1 to 1000000")
	refuse(s.BackoffBase < 0 || s.BackoffMax < 0, "backoff", "is negative")
	return errors.Join(errs...)
}

// applyTo changes the settings of a box to what the policy says.
func (p *Policy) applyTo(c *Config) {
	override(&c.MaxAttempts, p.MaxAttempts)
	override(&c.BackoffBase, p.BackoffBase)
	override(&c.BackoffMax, p.BackoffMax)
	override(&c.LeaseFor, p.Lease)
	c.MaxDeliveries = max(c.MaxDeliveries, 10*p.MaxAttempts)
	c.BackoffMax = max(c.BackoffMax, c.BackoffBase)
}

func override[T comparable](field *T, value T) {
	if value != *new(T) {
		*field = value
	}
}
