package inbox

import (
	"errors"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/schema"
)

// resultMaxMax is what the table accepts, without the bytes that name the codec.
const resultMaxMax = 1 << 20

// Config holds the settings of a [Box]. The zero value is usable; a zero field means its default.
type Config struct {
	Schema string // where the tables are; default "commitbox"

	// MaxAttempts is how many attempts a message has before it is dead. Default 10. Attempts that ended because of the
	// store, a serialization failure, a deadlock or a cancelled context of Process are not counted. What says that it was
	// the store is PostgreSQL's or the network's error in the handler's: wrap it with %w, for an error that hides it counts.
	MaxAttempts int
	// MaxDeliveries is the limit for Message.Delivery, above which a message that has a row, failed, becomes dead without
	// running again: it ends what kills its process each time. One without a row may never have run, because the store was
	// away; it runs once more and leaves a row first. The broker also counts deliveries that found the message in progress
	// or not due, so it is well above MaxAttempts. Default 10 × MaxAttempts.
	MaxDeliveries int
	// BackoffBase is the wait after the first failed attempt; it doubles with each one up to BackoffMax, with ±25 % of
	// jitter. Defaults 1 s and 5 min.
	BackoffBase, BackoffMax time.Duration
	// IgnoreDue runs a failed message although its next attempt is not due, for callers who are people or HTTP clients.
	IgnoreDue bool
	// ResultMax bounds the encoded result in bytes. Default and largest value 1 MiB.
	ResultMax int
	// Wait bounds how long a copy waits for the one that is running, by asking again and again. Process gives its
	// connection back in between; Handle waits only in a READ COMMITTED transaction, because no other can see the end.
	// Default 0: a copy gets ErrInProgress at once.
	Wait time.Duration
	// CommitWait bounds how long Process tries to find out what became of a COMMIT whose answer was lost, before it
	// answers ErrOutcomeUnknown. A question that is not answered is given up after 5 s. Default 10 s.
	CommitWait time.Duration
	// LeaseFor is how long a lease lasts without renewal; it is renewed after a third of it. Work of a process that died
	// is free after that time. Default 30 s, at least 1 s.
	LeaseFor time.Duration
	// IsPermanent says which errors of a handler make the message dead at once, beside those of [Permanent]. Default:
	// PostgreSQL's data exceptions (class 22), integrity violations (class 23, but not 23503 and 23505, which may be
	// gone when other transactions have committed) and class 42, such as a missing table or privilege, but not 42P03 and
	// 42P05, which tell of a pooler's mode. Who rolls a consumer out before its migration takes 42P01 and 42703 out with a
	// function of their own. If it panics, the failure counts as one attempt.
	IsPermanent func(error) bool

	// Policies say how each consumer's messages are guarded, at run time. Default: mode postgres, with what stands here.
	Policies *Policies
	// Cache is what mode double asks first; without it the mode is postgres. It needs Policies.
	Cache Cache
	// Guard is what mode cache works with, and a change from or to it; without it there is nothing to ask, as when it does
	// not answer. It needs Policies.
	Guard Guard

	Observer commitbox.Observer // default: commitbox.Discard
	Logger   *slog.Logger       // default: slog.Default()
}

// Box is an inbox in one database. It is safe for concurrent use and has nothing to close: it uses the caller's pool.
type Box struct {
	pool     *pgxpool.Pool
	renewals *renewals
	flights  *flights
	root     *Box // not nil: this one works by a policy, for one call or as long as that is current
	settings
}

// settings is a checked Config.
type settings struct {
	Config
	schema schema.Name
	policy *policy       // nil: mode postgres
	copies chan struct{} // one for each copy that is on its way to the cache
	cold   *cold         // where look-ups find nothing
}

// copiesMax bounds the copies that are on their way to the cache. One more is not written.
const copiesMax = 1024

var standard = mustSettings(Config{})

// New returns a Box. It sends nothing; its error names every field that is wrong. Not promised: that the database is
// there, or that its schema is migrated.
func New(pool *pgxpool.Pool, cfg Config) (*Box, error) {
	s, err := newSettings(cfg)
	if pool == nil {
		err = errors.Join(&commitbox.InputError{Field: "pool", Problem: "is nil"}, err)
	}
	if err != nil {
		return nil, err
	}
	return &Box{pool: pool, renewals: new(renewals), flights: newFlights(), settings: s}, nil
}

func mustSettings(cfg Config) *settings {
	s, err := newSettings(cfg)
	if err != nil {
		panic(err)
	}
	return &s
}

func newSettings(cfg Config) (settings, error) {
	cfg.fill()
	name, err := schema.Parse(cfg.Schema)
	if err != nil {
		err = &commitbox.InputError{Field: "Config.Schema", Problem: err.Error()}
	}
	if err := errors.Join(err, cfg.check()); err != nil {
		return settings{}, err
	}
	return settings{Config: cfg, schema: name, copies: make(chan struct{}, copiesMax), cold: new(cold)}, nil
}

func (c *Config) fill() {
	fill(&c.MaxAttempts, 10)
	fill(&c.MaxDeliveries, 10*c.MaxAttempts)
	fill(&c.BackoffBase, time.Second)
	fill(&c.BackoffMax, 5*time.Minute)
	fill(&c.ResultMax, resultMaxMax)
	fill(&c.CommitWait, 10*time.Second)
	fill(&c.LeaseFor, 30*time.Second)
	if c.IsPermanent == nil {
		c.IsPermanent = permanent
	}
	if c.Observer == nil {
		c.Observer = commitbox.Discard
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

func fill[T comparable](field *T, standard T) {
	if *field == *new(T) {
		*field = standard
	}
}

func (c *Config) check() error {
	var errs []error
	refuse := func(bad bool, field, problem string) {
		if bad {
			errs = append(errs, &commitbox.InputError{Field: "Config." + field, Problem: problem})
		}
	}
	refuse(c.MaxAttempts < 1 || c.MaxAttempts > 1e6, "MaxAttempts", "must be 1 to 1000000")
	refuse(c.MaxDeliveries < 1, "MaxDeliveries", "must be at least 1")
	refuse(c.BackoffBase < 0, "BackoffBase", "is negative")
	refuse(c.BackoffMax < c.BackoffBase, "BackoffMax", "is shorter than BackoffBase")
	refuse(c.ResultMax < 1 || c.ResultMax > resultMaxMax, "ResultMax", "must be 1 to 1048576 bytes")
	refuse(c.Wait < 0, "Wait", "is negative")
	refuse(c.CommitWait < 0, "CommitWait", "is negative")
	refuse(c.LeaseFor < time.Second, "LeaseFor", "is shorter than 1 s")
	refuse(c.Cache != nil && c.Policies == nil, "Cache", "needs Policies")
	refuse(c.Guard != nil && c.Policies == nil, "Guard", "needs Policies")
	return errors.Join(errs...)
}
