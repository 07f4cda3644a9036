package rabbitmq

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"runtime/debug"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/inbox"
)

// session is the time of one connection. Deliveries can only be settled on the channel that brought them; what a
// session has not settled when it ends, the broker delivers again.
type session struct {
	*run
	link       *link
	ch         *amqp.Channel
	closes     chan *amqp.Error
	tag        string
	deliveries <-chan amqp.Delivery
	ended      chan struct{} // closed when held deliveries have to go back
}

// session connects and consumes until ctx ends or the connection does. It returns why it ended.
func (r *run) session(ctx context.Context) error {
	conn, sock, err := r.endpoint.connect(ctx, r.node)
	if err != nil {
		r.node++
		return err
	}
	s := &session{run: r, link: newLink(conn, sock, &r.work), tag: "commitbox-" + rand.Text(), ended: make(chan struct{})}
	defer s.close(ctx)
	if err := s.subscribe(ctx); err != nil {
		return fmt.Errorf("rabbitmq: consume from %q: %w", r.cfg.Queue, err)
	}
	r.cfg.Logger.Info("rabbitmq: consuming", "consumer", r.cfg.Name, "queue", r.cfg.Queue, "node", sock.RemoteAddr().String())
	err = s.take(ctx)
	if ctx.Err() != nil {
		s.stop(ctx)
	}
	return err
}

func (s *session) subscribe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	return s.link.bounded(ctx, func() (err error) {
		if s.ch, err = s.link.conn.Channel(); err != nil {
			return err
		}
		s.closes = s.ch.NotifyClose(make(chan *amqp.Error, 1))
		if err := s.requireQueues(); err != nil {
			return err
		}
		if err := s.ch.Qos(s.cfg.Workers+s.cfg.Prefetch+s.cfg.HeldMax, 0, false); err != nil {
			return err
		}
		s.deliveries, err = s.ch.Consume(s.cfg.Queue, s.tag, false, false, false, false, nil)
		return err
	})
}

// requireQueues makes sure that messages which are to wait or to be given up will have a place.
func (s *session) requireQueues() error {
	for _, name := range []string{s.cfg.RetryQueue, s.cfg.DeadLetterQueue} {
		if name == "" {
			continue
		}
		if _, err := s.ch.QueueDeclarePassive(name, true, false, false, false, nil); err != nil {
			return fmt.Errorf("look for queue %q: %w", name, err)
		}
	}
	return nil
}

// take starts a handler for each delivery, until ctx ends or the deliveries do. In the second case it says why.
func (s *session) take(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case raw, open := <-s.deliveries:
			if !open {
				return s.lost()
			}
			select {
			case s.slots <- struct{}{}:
				s.active.Add(1)
				s.workers.Go(func() { s.handle(raw) })
			case <-ctx.Done():
				s.requeue(raw)
				return nil
			case <-s.link.gone:
				return s.lost()
			}
		}
	}
}

func (s *session) lost() error {
	if s.link.alive() && !s.ch.IsClosed() {
		return errors.New("the broker cancelled the consumer; was the queue deleted or moved?")
	}
	if err := <-s.closes; err != nil {
		return err
	}
	return errConnectionLost
}

// stop takes no more deliveries, gives back those that no handler has, and waits for the handlers.
func (s *session) stop(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closePatience)
	defer cancel()
	s.work.Go(func() {
		_ = s.link.bounded(ctx, func() error { return s.ch.Cancel(s.tag, false) }) // a dead connection ends the deliveries, too
	})
	for raw := range s.deliveries {
		s.requeue(raw)
	}
	close(s.ended)
	_ = s.drain() // Run tells what is left
	s.held.Wait()
}

// close ends the session. Closing in order makes sure that the broker has read every settlement.
func (s *session) close(ctx context.Context) {
	select {
	case <-s.ended:
	default:
		close(s.ended)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closePatience)
	defer cancel()
	s.link.close(ctx)
}

// handle runs the handler for one delivery and settles it, however the handler ends.
func (s *session) handle(raw amqp.Delivery) {
	d := newDelivery(s.cfg.Name, raw)
	d.Delivery = s.cfg.deliveries(raw)
	err := errExited
	defer func() {
		if value := recover(); value != nil {
			err = &inbox.PanicError{Value: value, Stack: debug.Stack()}
		}
		s.finish(raw, d, err)
		s.active.Add(-1)
		<-s.slots
	}()
	err = s.process(&d)
}

// extractID asks MessageID for the id. One that panics has found none.
func (s *session) extractID(d Delivery) (id string) {
	if s.cfg.MessageID == nil {
		return ""
	}
	defer func() {
		if value := recover(); value != nil {
			s.cfg.Logger.Error("rabbitmq: MessageID panicked, the message counts as one without an id", "consumer", s.cfg.Name, "stack", string(debug.Stack()))
			id = ""
		}
	}()
	return s.cfg.MessageID(d)
}
