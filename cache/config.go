package cache

import (
	"cmp"
	"errors"
	"log/slog"
	"regexp"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox"
)

// Config sets up a [Cache]. All but Secrets have a default.
type Config struct {
	// Secrets sign what is stored, so that nobody who can write to Redis decides what has been handled: the first one signs,
	// all of them are believed. Each has at least 16 bytes, random and known to no other program. There is no default: a key
	// that everybody knows would protect nothing, and one made at start would make every process a stranger to the others.
	// To replace a secret, add the new one behind the old one in every process, then put it first, then drop the old one
	// when its entries have expired. A process that does not know a secret takes what was signed with it for forged.
	Secrets [][]byte

	// Prefix is what all keys begin with. Default "commitbox". 1 to 64 of the characters a-z A-Z 0-9 _ - . : and /.
	// Inboxes of different databases that share a Redis need different ones.
	Prefix string

	// Timeout is the time budget of one call, which includes waiting for a connection and making one. Default 20 ms.
	Timeout time.Duration

	// EntryMax bounds a stored entry in bytes; a larger one is neither written nor read. Default 1 MiB + 1 KiB, which holds
	// the largest result of an inbox.
	EntryMax int

	// After FailuresMax calls in a row without an answer (default 5) Redis is left alone for OpenFor (default 1 s): calls
	// return ErrUnavailable at once. Then one call is let through, and if it succeeds all are.
	FailuresMax int
	OpenFor     time.Duration

	Observer commitbox.Observer // default: none
	Logger   *slog.Logger       // default: slog.Default()
}

const (
	defaultPrefix      = "commitbox"
	defaultFailuresMax = 5
	defaultOpenFor     = time.Second
	entryMaxMin        = 256
	secretLenMin       = 16
	prefixRule         = "must be 1 to 64 of the characters a-z A-Z 0-9 _ - . : /"
)

var prefixForm = regexp.MustCompile(`^[a-zA-Z0-9_.:/-]{1,64}$`)

func (c Config) withDefaults() Config {
	c.Prefix = cmp.Or(c.Prefix, defaultPrefix)
	c.Timeout = cmp.Or(c.Timeout, 20*time.Millisecond)
	c.EntryMax = cmp.Or(c.EntryMax, 1<<20+1<<10)
	c.FailuresMax = cmp.Or(c.FailuresMax, defaultFailuresMax)
	c.OpenFor = cmp.Or(c.OpenFor, defaultOpenFor)
	c.Observer = cmp.Or(c.Observer, commitbox.Discard)
	c.Logger = cmp.Or(c.Logger, slog.Default())
	return c
}

// check names every bad field at once.
func (c Config) check(client redis.UniversalClient) error {
	errs := []error{
		refuse(client == nil, "client", "is nil"),
		refuse(len(c.Secrets) == 0, "Config.Secrets", "is empty; make one secret of 32 random bytes and give it to every process"),
		refuse(!prefixForm.MatchString(c.Prefix), "Config.Prefix", prefixRule),
		refuse(c.Timeout < time.Millisecond, "Config.Timeout", "is less than 1 ms"),
		refuse(c.EntryMax < entryMaxMin, "Config.EntryMax", "is less than 256 bytes"),
		refuse(c.FailuresMax < 1, "Config.FailuresMax", "is not positive"),
		refuse(c.OpenFor <= 0, "Config.OpenFor", "is not positive"),
	}
	for _, secret := range c.Secrets {
		errs = append(errs, refuse(len(secret) < secretLenMin, "Config.Secrets", "has a secret of less than 16 bytes"))
	}
	return errors.Join(errs...)
}

func refuse(bad bool, field, problem string) error {
	if !bad {
		return nil
	}
	return &commitbox.InputError{Field: field, Problem: problem}
}
