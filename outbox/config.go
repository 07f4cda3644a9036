package outbox

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/schema"
)

// RelayConfig sets up a [Relay]. The zero value is usable.
type RelayConfig struct {
	Schema  string // default "commitbox"
	Channel string // the channel to serve; default "default"

	Lanes      int   // sequential loops, each with its own shards and connection; default 2, at most 64
	Batch      int   // messages that a lane reads at once, at most, but one of each of its shards; default 1000
	BatchBytes int64 // payload bytes that a lane reads at once, give or take one message; default 8 MiB

	// Lease is how long the relay's shards stay its own after it has died; another relay takes over then. Default 15 s.
	// The next four default to fixed parts of it. NewRelay refuses values for which a relay that cannot renew might
	// still be sending when its lease ends: 3·Renew + RenewTimeout + PublishTimeout + Guard must not exceed 0.999·Lease.
	Lease          time.Duration
	Renew          time.Duration // interval of renewals; default Lease/6
	RenewTimeout   time.Duration // bound of one renewal; default Lease·2/15
	PublishTimeout time.Duration // bound of one Publish call; default Lease·4/15
	Guard          time.Duration // allowance for scheduling; how late Publish may come back after its context ended; default Lease/15

	PollMin time.Duration // how often to look for new messages while some arrived in the last second; default 1 ms
	PollMax time.Duration // how often to look when idle, reached by doubling; default 100 ms

	MaxAttempts int           // failures after which a message is dead; default 20
	BackoffBase time.Duration // delay after the first failure, at most; doubles with each; default 1 s
	BackoffMax  time.Duration // greatest delay; default 5 min

	// MaxWriterAge is how long the relay waits for a transaction that has enqueued and stays open. After it, messages
	// of the transaction's keys that were committed later may overtake its own; it is logged with its pid. Default 60 s.
	MaxWriterAge time.Duration

	Observer commitbox.Observer // default: none
	Logger   *slog.Logger       // default: slog.Default()

	random func() float64 // for jitter; the simulation's is replayable
}

func (c RelayConfig) withDefaults() RelayConfig {
	c.Channel = cmp.Or(c.Channel, DefaultChannel)
	c.Lanes = cmp.Or(c.Lanes, 2)
	c.Batch = cmp.Or(c.Batch, 1000)
	c.BatchBytes = cmp.Or(c.BatchBytes, 8<<20)
	c.Lease = cmp.Or(c.Lease, 15*time.Second)
	c.Renew = cmp.Or(c.Renew, c.Lease/6)
	c.RenewTimeout = cmp.Or(c.RenewTimeout, c.Lease*2/15)
	c.PublishTimeout = cmp.Or(c.PublishTimeout, c.Lease*4/15)
	c.Guard = cmp.Or(c.Guard, c.Lease/15)
	c.PollMin = cmp.Or(c.PollMin, time.Millisecond)
	c.PollMax = cmp.Or(c.PollMax, 100*time.Millisecond)
	c.MaxAttempts = cmp.Or(c.MaxAttempts, 20)
	c.BackoffBase = cmp.Or(c.BackoffBase, time.Second)
	c.BackoffMax = cmp.Or(c.BackoffMax, 5*time.Minute)
	c.MaxWriterAge = cmp.Or(c.MaxWriterAge, time.Minute)
	c.Observer = cmp.Or(c.Observer, commitbox.Discard)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

// check names every bad field at once.
func (c RelayConfig) check() error {
	_, schemaErr := schema.Parse(c.Schema)
	errs := []error{schemaErr, check.Text("Channel", c.Channel, channelMax)}
	require := func(ok bool, format string, args ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, args...))
		}
	}
	require(c.Lanes >= 1 && c.Lanes <= shards, "Lanes is %d, not between 1 and %d", c.Lanes, shards)
	require(c.Batch >= 1 && c.Batch <= batchMax, "Batch is %d, not between 1 and %d", c.Batch, batchMax)
	require(c.BatchBytes >= 1, "BatchBytes is %d, not positive", c.BatchBytes)
	for name, d := range map[string]time.Duration{
		"Lease": c.Lease, "Renew": c.Renew, "RenewTimeout": c.RenewTimeout, "PublishTimeout": c.PublishTimeout, "Guard": c.Guard,
		"PollMin": c.PollMin, "PollMax": c.PollMax, "BackoffBase": c.BackoffBase, "BackoffMax": c.BackoffMax, "MaxWriterAge": c.MaxWriterAge,
	} {
		require(d > 0, "%s is %v, not positive", name, d)
	}
	require(3*c.Renew+c.RenewTimeout+c.PublishTimeout+c.Guard <= safely(c.Lease),
		"3·Renew + RenewTimeout + PublishTimeout + Guard is %v, more than 0.999 of the Lease of %v: a relay that cannot renew might still be sending when another takes over",
		3*c.Renew+c.RenewTimeout+c.PublishTimeout+c.Guard, c.Lease)
	require(c.PollMin <= c.PollMax, "PollMin %v is greater than PollMax %v", c.PollMin, c.PollMax)
	require(c.BackoffBase <= c.BackoffMax, "BackoffBase %v is greater than BackoffMax %v", c.BackoffBase, c.BackoffMax)
	require(c.MaxAttempts >= 1, "MaxAttempts is %d, not positive", c.MaxAttempts)
	return errors.Join(errs...)
}

// batchMax bounds the arrays that one statement carries.
const batchMax = 100_000

// safely is the part of a lease that may be counted on when this clock and the database's run at slightly different rates.
func safely(lease time.Duration) time.Duration { return lease - lease/1000 }
