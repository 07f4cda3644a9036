package rabbitmq

import (
	"context"
	"errors"
	"runtime/debug"
	"strconv"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
)

const (
	// moveTimeout bounds the publishing to the retry queue or the dead-letter queue.
	moveTimeout = 5 * time.Second
	// movePause is the wait before a message that could not be moved is looked at again.
	movePause = 5 * time.Second
)

// settlement is what happened to a delivery at the broker, as it stands in metrics.
type settlement = string

const (
	settledAck        settlement = "ack"
	settledRetry      settlement = "retry"
	settledDeadLetter settlement = "dead_letter"
	settledMissingID  settlement = "missing_id"
	settledError      settlement = "error"
)

// finish settles a delivery and tells about it.
func (s *session) finish(raw amqp.Delivery, d Delivery, err error) {
	done := s.settle(raw, d, err)
	s.cfg.Observer.Observe(commitbox.ConsumerMessages, 1, s.cfg.Name, done)
	if err == nil {
		return
	}
	s.cfg.Logger.Warn("rabbitmq: delivery was not handled",
		"consumer", s.cfg.Name, "message_id", d.ID.Message, "reason", reason(err), "settlement", done)
	s.report(d, err)
}

// report calls the error hook. A panic in it must not end the process: the delivery is settled.
func (s *session) report(d Delivery, err error) {
	if s.cfg.OnError == nil {
		return
	}
	defer func() {
		if value := recover(); value != nil {
			s.cfg.Logger.Error("rabbitmq: OnError panicked", "consumer", s.cfg.Name, "message_id", d.ID.Message, "stack", string(debug.Stack()))
		}
	}()
	s.cfg.OnError(s.handling, d, err)
}

// settle does at the broker what [inbox.Disposition] says.
func (s *session) settle(raw amqp.Delivery, d Delivery, err error) settlement {
	if errors.Is(err, ErrMissingID) {
		return s.deadLetter(raw, d, err, settledMissingID)
	}
	switch action := inbox.Disposition(err); action.Verdict {
	case inbox.Ack:
		return s.settled(raw.Ack(false), d, settledAck)
	case inbox.DeadLetter:
		return s.deadLetter(raw, d, err, settledDeadLetter)
	default:
		return s.retry(raw, d, err, action.After)
	}
}

// settled returns done, or settledError when the broker could not be told: it will deliver the message again.
func (s *session) settled(err error, d Delivery, done settlement) settlement {
	if err == nil {
		return done
	}
	s.cfg.Logger.Info("rabbitmq: settlement lost, the message will come again",
		"consumer", s.cfg.Name, "message_id", d.ID.Message, "settlement", done, "error", err)
	return settledError
}

func (s *session) deadLetter(raw amqp.Delivery, d Delivery, cause error, done settlement) settlement {
	if s.cfg.DeadLetterByBroker {
		return s.settled(raw.Reject(false), d, done)
	}
	message := d.moved(raw)
	message.Headers[HeaderReason] = reason(cause)
	err := s.move(s.cfg.DeadLetterQueue, message, d)
	if errors.Is(err, ErrTooLarge) {
		message.Headers = bareHeaders(raw, reason(cause))
		err = s.move(s.cfg.DeadLetterQueue, message, d)
	}
	if err != nil {
		s.hold(raw, movePause)
		return settledError
	}
	return s.settled(raw.Ack(false), d, done)
}

func (s *session) retry(raw amqp.Delivery, d Delivery, cause error, after time.Duration) settlement {
	if s.cfg.RetryQueue == "" {
		s.hold(raw, after)
		return settledRetry
	}
	message := d.moved(raw)
	message.Headers[HeaderDeliveries] = int64(d.used(cause))
	message.Expiration = strconv.FormatInt(max(after.Milliseconds(), 1), 10)
	if err := s.move(s.cfg.RetryQueue, message, d); err != nil {
		s.hold(raw, max(after, movePause))
		return settledError
	}
	return s.settled(raw.Ack(false), d, settledRetry)
}

// move publishes a copy to a queue and returns nil when the queue has it.
func (s *session) move(queue string, message amqp.Publishing, d Delivery) error {
	ctx, cancel := context.WithTimeout(context.Background(), moveTimeout)
	defer cancel()
	err := s.mover.publish(ctx, []outgoing{{key: queue, mandatory: true, message: message}})[0]
	if err != nil {
		s.cfg.Logger.Error("rabbitmq: message could not be moved, it stays in its queue",
			"consumer", s.cfg.Name, "message_id", d.ID.Message, "to", queue, "error", err)
	}
	return err
}

// hold keeps a delivery unacknowledged until it is due and then gives it back to the broker, which delivers it again.
// The number of held deliveries is bounded; beyond it the calling worker waits.
func (s *session) hold(raw amqp.Delivery, after time.Duration) {
	due := time.NewTimer(min(after, s.cfg.HoldMax))
	select {
	case s.holds <- struct{}{}:
		s.held.Go(func() {
			defer func() { <-s.holds }()
			s.requeueWhenDue(raw, due)
		})
	case <-due.C:
		s.requeue(raw)
	case <-s.ended:
		s.requeue(raw)
	}
}

func (s *session) requeueWhenDue(raw amqp.Delivery, due *time.Timer) {
	defer due.Stop()
	select {
	case <-due.C:
	case <-s.ended:
	}
	s.requeue(raw)
}

// requeue gives a delivery back. If the broker cannot be told, it takes it back by itself when the channel ends.
func (s *session) requeue(raw amqp.Delivery) { _ = raw.Nack(false, true) }

// used is how many deliveries a message has used up that was not handled because of cause. One that found the message
// held, not due or the store away did not run and does not count.
func (d Delivery) used(cause error) int {
	var e *inbox.Error
	if errors.As(cause, &e) {
		switch e.Outcome {
		case inbox.Unavailable, inbox.InProgress, inbox.NotDue, inbox.Unknown:
			return max(d.Delivery-1, 0)
		}
	}
	return max(d.Delivery, 1)
}

// reason names the cause of a failure in a word, without anything of the message in it.
func reason(err error) string {
	var e *inbox.Error
	var input *commitbox.InputError
	switch {
	case errors.Is(err, ErrMissingID):
		return settledMissingID
	case errors.As(err, &e):
		return e.Outcome.String()
	case errors.As(err, &input):
		return "invalid"
	case errors.Is(err, inbox.ErrTxEnded):
		return "tx_ended"
	default:
		return "failed"
	}
}
