package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/commitbox/commitbox/outbox"
)

// sender publishes with confirms. It connects when it has something to send, and again when the connection broke.
// It is safe for concurrent use.
type sender struct {
	endpoint endpoint
	log      *slog.Logger
	life     context.Context // ends when close gives up waiting
	end      context.CancelCauseFunc
	work     sync.WaitGroup // goroutines of the links

	mu     sync.Mutex // guards closed, and adding to calls
	closed bool
	calls  sync.WaitGroup

	turn    chan struct{} // held while looking at the fields below
	link    *link
	node    int // index of the URL to try first
	backoff backoff
}

func newSender(e endpoint, log *slog.Logger) *sender {
	s := &sender{endpoint: e, log: log, turn: make(chan struct{}, 1)}
	s.life, s.end = context.WithCancelCause(context.Background())
	return s
}

// publish sends the batch and answers one error per message, as [outbox.Publisher] wants it. Messages to different
// exchanges travel on different channels, because the broker closes the channel of a message whose exchange is
// missing, and forgets what lies behind it.
func (s *sender) publish(ctx context.Context, batch []outgoing) []error {
	errs := make([]error, len(batch))
	if !s.enter() {
		fill(errs, outbox.Unavailable(ErrClosed))
		return errs
	}
	defer s.calls.Done()
	ctx, cancel := s.within(ctx)
	defer cancel(nil)

	l, err := s.connected(ctx)
	if err == nil {
		err = l.blockedError()
	}
	if err != nil {
		fill(errs, outbox.Unavailable(err))
		return errs
	}
	for i, o := range batch {
		if err := o.fits(l.conn.Config.FrameSize); err != nil {
			errs[i] = outbox.Permanent(err)
		}
	}
	var flights sync.WaitGroup
	for _, group := range byExchange(batch, errs) {
		flights.Go(func() { publishGroup(ctx, l, batch, group, errs) })
	}
	flights.Wait()
	return errs
}

// publishGroup publishes the messages batch[i] for i in group, which have one exchange, and sets errs[i].
func publishGroup(ctx context.Context, l *link, batch []outgoing, group []int, errs []error) {
	part := make([]outgoing, len(group))
	for k, i := range group {
		part[k] = batch[i]
	}
	for k, err := range flyOn(ctx, l, part) {
		errs[group[k]] = err
		if suspect(err) && len(part) > 1 {
			// Any message of the batch may be the one that the broker complained about.
			errs[group[k]] = flyOn(ctx, l, part[k:k+1])[0]
		}
	}
}

// suspect tells that the message was on a channel that was closed because of one of its messages.
func suspect(err error) bool {
	x := (*exception)(nil)
	return errors.As(err, &x) && !x.connection && !x.aboutExchange()
}

// flyOn sends a batch on a channel of the link.
func flyOn(ctx context.Context, l *link, batch []outgoing) []error {
	c, err := l.borrow(ctx, len(batch))
	if err != nil {
		errs := make([]error, len(batch))
		fill(errs, outbox.Unavailable(fmt.Errorf("rabbitmq: open a channel: %w", err)))
		return errs
	}
	errs, reusable := fly(ctx, c, batch)
	if reusable {
		l.giveBack(c)
	} else {
		l.retire(c)
	}
	return errs
}

// connected returns the link, after making one if need be. One caller at a time connects, the others wait for it.
func (s *sender) connected(ctx context.Context) (*link, error) {
	select {
	case s.turn <- struct{}{}:
		defer func() { <-s.turn }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if s.link != nil && s.link.alive() {
		return s.link, nil
	}
	s.forget()
	if err := s.backoff.refusal(); err != nil {
		return nil, err
	}
	conn, sock, err := s.endpoint.connect(ctx, s.node)
	if errors.Is(ctx.Err(), context.Canceled) && err != nil {
		return nil, err // says nothing about the broker
	}
	if err != nil {
		s.node++ // a node that does not answer must not use up every caller's time
		s.backoff.failed(err)
		return nil, err
	}
	s.backoff.succeeded()
	s.link = newLink(conn, sock, &s.work)
	s.log.Info("rabbitmq: connected", "node", sock.RemoteAddr().String())
	return s.link, nil
}

// forget drops a link that has ended.
func (s *sender) forget() {
	if s.link != nil {
		<-s.link.gone
		reason := errConnectionLost.Error()
		if s.link.reason != nil {
			reason = s.link.reason.Reason
		}
		s.log.Warn("rabbitmq: connection lost", "reason", reason)
		s.link = nil
	}
}

// within returns a context that also ends with the sender.
func (s *sender) within(ctx context.Context) (context.Context, context.CancelCauseFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	undo := context.AfterFunc(s.life, func() { cancel(ErrClosed) })
	return ctx, func(cause error) {
		undo()
		cancel(cause)
	}
}

func (s *sender) enter() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return false
	}
	s.calls.Add(1)
	return true
}

// close refuses new calls and waits for the running ones; when ctx ends they are broken off. It returns ctx's error in
// that case. Nothing of the sender runs afterwards.
func (s *sender) close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()

	undo := context.AfterFunc(ctx, func() { s.end(ErrClosed) })
	s.calls.Wait()
	s.turn <- struct{}{}
	if s.link != nil {
		s.link.close(ctx)
	}
	<-s.turn
	s.work.Wait()
	if !undo() {
		return fmt.Errorf("rabbitmq: publisher closed by force: %w", context.Cause(ctx))
	}
	s.end(ErrClosed)
	return nil
}

// byExchange returns, for each exchange, the indexes of the messages that have no error yet.
func byExchange(batch []outgoing, errs []error) map[string][]int {
	groups := map[string][]int{}
	for i, o := range batch {
		if errs[i] == nil {
			groups[o.exchange] = append(groups[o.exchange], i)
		}
	}
	return groups
}

func fill(errs []error, err error) {
	for i := range errs {
		errs[i] = err
	}
}

const (
	backoffMin = 50 * time.Millisecond
	backoffMax = 5 * time.Second
)

// backoff spaces attempts to connect. The first attempt after a success is free.
type backoff struct {
	delay time.Duration
	until time.Time
	cause error
}

// refusal returns an error while it is too early for an attempt.
func (b *backoff) refusal() error {
	if wait := time.Until(b.until); wait > 0 {
		return fmt.Errorf("%w (next attempt in %v)", b.cause, wait.Round(time.Millisecond))
	}
	return nil
}

func (b *backoff) failed(cause error) {
	b.delay = min(max(2*b.delay, backoffMin), backoffMax)
	b.until, b.cause = time.Now().Add(b.delay), cause
}

func (b *backoff) succeeded() { *b = backoff{} }
