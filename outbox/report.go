package outbox

import "github.com/commitbox/commitbox"

// report counts and logs an error of the relay itself. The pauses after errors bound how often it is called.
func (s *session) report(err error, part string) {
	s.cfg.Observer.Observe(commitbox.OutboxErrors, 1, s.cfg.Channel, "database")
	s.cfg.Logger.Error("outbox: relay lost touch with the database and tries again", "channel", s.cfg.Channel, "part", part, "error", err)
}

// logFailures counts and logs what failed.
func (l *lane) logFailures(rows []row, verdicts []verdict, d decision) {
	if n := len(d.change.buried); n > 0 {
		l.cfg.Observer.Observe(commitbox.OutboxDead, float64(n), l.cfg.Channel)
	}
	for i := range rows {
		switch v := verdicts[i]; {
		case v.result == resultPermanent, v.result == resultRetryable && rows[i].Attempt >= l.policy.maxAttempts:
			l.cfg.Logger.Error("outbox: message is dead; requeue it once the cause is gone", "channel", l.cfg.Channel,
				"message_id", rows[i].ID, "attempt", rows[i].Attempt, "error", v.err)
		case v.result == resultRetryable:
			l.cfg.Logger.Warn("outbox: message failed and is deferred", "channel", l.cfg.Channel,
				"message_id", rows[i].ID, "attempt", rows[i].Attempt, "error", v.err)
		}
	}
}
