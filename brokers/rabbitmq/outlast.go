package rabbitmq

import (
	"context"
	"errors"
	"time"

	"github.com/commitbox/commitbox/inbox"
)

const (
	// probeTimeout bounds one question to a store that may be away.
	probeTimeout  = 5 * time.Second
	probePauseMin = 100 * time.Millisecond
	probePauseMax = 5 * time.Second
)

// process handles a delivery through the inbox. While the store is away the delivery waits here, with its worker: given
// back, it would come again at once, and a broker that counts deliveries would give it up without its handler having
// run.
func (s *session) process(d *Delivery) error {
	if d.ID.Message == "" {
		d.ID.Message = s.extractID(*d)
	}
	if d.ID.Message == "" {
		return ErrMissingID
	}
	for {
		err := s.Consumer.handle(s.handling, *d)
		missing := errors.Is(err, inbox.ErrUnavailable) || errors.Is(err, inbox.ErrOutcomeUnknown)
		if !missing || !s.outlast(d.ID, err) {
			return err
		}
	}
}

// outlast waits while the store does not answer, and says whether it was away and is back. It does not wait if the
// store answers, for then cause is about this message, nor when the session has ended.
func (s *session) outlast(id inbox.ID, cause error) (back bool) {
	for pause := probePauseMin; !s.storeAnswers(id); pause = min(2*pause, probePauseMax) {
		if !back {
			s.cfg.Logger.Warn("rabbitmq: the store is away, the worker waits for it", "consumer", s.cfg.Name, "message_id", id.Message, "error", cause)
		}
		back = true
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-s.ended:
			timer.Stop()
			return false
		case <-s.handling.Done():
			timer.Stop()
			return false
		}
	}
	return back
}

func (s *session) storeAnswers(id inbox.ID) bool {
	ctx, cancel := context.WithTimeout(s.handling, probeTimeout)
	defer cancel()
	_, _, err := inbox.IsCompleted[inbox.Void](ctx, s.box, id)
	return err == nil
}
