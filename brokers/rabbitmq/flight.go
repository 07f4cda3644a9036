package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/outbox"
)

// outgoing is a message with its way.
type outgoing struct {
	exchange  string
	key       string
	mandatory bool // a message that no queue gets comes back
	message   amqp.Publishing
}

func (o outgoing) failed(err error) error {
	return &PublishError{MessageID: o.message.MessageId, Exchange: o.exchange, RoutingKey: o.key, Err: err}
}

// flight is a batch on its way over one channel: everything is sent, then the answers are awaited.
//
// Sending runs in a goroutine of its own, since a write to a broker that does not read hangs. The waiting side comes
// back when its context ends; a write that hangs then ends with the connection.
type flight struct {
	channel *channel
	batch   []outgoing

	confirms []*amqp.DeferredConfirmation
	begun    atomic.Int64  // messages whose writing began
	written  atomic.Int64  // confirms that are set
	sent     chan struct{} // closed when sending ended
}

// fly sends the batch and returns what became of each message, and whether the channel can be used again. A broken
// channel answers for several messages with an *exception each; the caller finds out which one broke it.
func fly(ctx context.Context, c *channel, batch []outgoing) (errs []error, reusable bool) {
	f := &flight{
		channel:  c,
		batch:    batch,
		confirms: make([]*amqp.DeferredConfirmation, len(batch)),
		sent:     make(chan struct{}),
	}
	c.link.work.Go(func() { f.send(ctx) })
	select {
	case <-f.sent:
	case <-ctx.Done():
	}
	return f.wait(ctx)
}

func (f *flight) send(ctx context.Context) {
	defer close(f.sent)
	for i, o := range f.batch {
		if ctx.Err() != nil {
			return
		}
		f.begun.Add(1)
		confirm, err := f.channel.PublishWithDeferredConfirm(o.exchange, o.key, o.mandatory, false, o.message)
		if err != nil {
			return // the channel is closed, and its close notice says why
		}
		f.confirms[i] = confirm
		f.written.Add(1)
	}
}

// answer is what is known of one message.
type answer uint8

const (
	notTried answer = iota // nothing was sent
	silent                 // sent, at least in part; no answer
	acked
	nacked
	lost // sent; the channel ended before the answer
)

func (f *flight) wait(ctx context.Context) (errs []error, reusable bool) {
	written := int(f.written.Load())
	answers := make([]answer, len(f.batch))
	for i := range int(f.begun.Load()) {
		answers[i] = silent
		if i < written {
			answers[i] = f.await(ctx, i)
		}
	}
	return f.judge(ctx, answers), !f.broken(answers)
}

// await returns the broker's answer to a message that was sent. The library answers "nack" for all that is open when
// the channel ends.
func (f *flight) await(ctx context.Context, i int) answer {
	confirm := f.confirms[i]
	select {
	case <-confirm.Done(): // an answer that is here counts, whatever ctx says
	default:
		select {
		case <-confirm.Done():
		case <-ctx.Done():
			return silent
		}
	}
	switch {
	case confirm.Acked():
		return acked
	case f.channel.IsClosed():
		return lost
	default:
		return nacked
	}
}

// broken tells that the channel has ended or that an answer may yet arrive on it.
func (f *flight) broken(answers []answer) bool {
	for _, a := range answers {
		if a != acked && a != nacked {
			return true
		}
	}
	return f.channel.IsClosed()
}

func (f *flight) judge(ctx context.Context, answers []answer) []error {
	errs := make([]error, len(f.batch))
	returned := f.returned()
	var ended error
	if f.channel.IsClosed() {
		ended = f.ending(ctx)
	}
	for i, o := range f.batch {
		switch answers[i] {
		case acked:
			if r, back := returned[o.message.MessageId]; back {
				errs[i] = o.failed(fmt.Errorf("%w: %s (%d); bind a queue, or allow it for this route", ErrUnroutable, r.ReplyText, r.ReplyCode))
			}
		case nacked:
			errs[i] = o.failed(ErrRefused)
		default:
			errs[i] = f.unanswered(ctx, o, answers[i], ended)
		}
	}
	return errs
}

// unanswered judges a message that the broker said nothing about.
func (f *flight) unanswered(ctx context.Context, o outgoing, a answer, ended error) error {
	blocked := f.channel.link.blockedError()
	switch {
	case ended != nil:
		return f.blame(o, ended)
	case blocked != nil:
		return outbox.Unavailable(o.failed(blocked))
	case a == notTried:
		return outbox.ErrNotTried
	default:
		return o.failed(errors.Join(ErrUnconfirmed, context.Cause(ctx)))
	}
}

// blame gives a message its error when the channel has ended.
func (f *flight) blame(o outgoing, ended error) error {
	err := o.failed(ended)
	switch x := (*exception)(nil); {
	case !errors.As(ended, &x):
		return outbox.Unavailable(err)
	case x.aboutMessage() && len(f.batch) == 1:
		return outbox.Permanent(err)
	default:
		return err
	}
}

// ending returns why the channel ended: an *exception if the broker did not like what it was sent, any other error if
// the connection went away.
func (f *flight) ending(ctx context.Context) error {
	err := f.channel.closeError(ctx)
	switch {
	case err == nil:
		return errConnectionLost
	case !err.Server:
		return fmt.Errorf("%w: %s", errConnectionLost, err.Reason)
	case err.Code == amqp.ConnectionForced:
		return fmt.Errorf("%w: %s", errConnectionLost, err.Reason)
	default:
		return &exception{code: err.Code, reason: err.Reason, connection: !f.channel.link.alive()}
	}
}

// returned collects the messages that came back. The broker returns a message before it confirms it, and the library
// hands both on in that order, so those of confirmed messages are here.
func (f *flight) returned() map[string]amqp.Return {
	returned := map[string]amqp.Return{}
	for {
		select {
		case r, open := <-f.channel.returns:
			if !open {
				return returned
			}
			returned[r.MessageId] = r
		default:
			return returned
		}
	}
}
