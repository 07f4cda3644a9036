package scheduler

import (
	"errors"
	"log/slog"
	"time"

	"github.com/commitbox/commitbox"
)

// CleanupReport says what a run did. Its numbers are a lower bound when the run ended with an error: the last batch may have been
// committed without an answer.
type CleanupReport struct {
	Skipped  bool          // another cleaner was at work: nothing was done
	Finished bool          // nothing was left to remove when it ended; false: the next run goes on
	Took     time.Duration //

	Completed, Dead int64 // inbox rows removed
	Abandoned       int64 // failed inbox rows that became dead
	Discarded       int64 // discarded outgoing messages removed
	Gone            int64 // rows removed of relays and replicas that ended long ago

	DaysMade, DaysDropped int // partitions of kept messages

	Resumed int   // runs of completers that went well
	Expired int64 // leases that have expired and whose consumer has no completer, up to 10 000 of each consumer

	// Odd tells of rows that were written by hand, or by a wrong clock, and that a run does not understand: it leaves them.
	Odd []string
}

// The kinds of rows, as the metric's label says them.
const (
	kindCompleted = "completed"
	kindDead      = "dead"
	kindAbandoned = "abandoned"
	kindDiscarded = "discarded"
	kindGone      = "gone"
)

func (r *CleanupReport) add(kind string, n int64) {
	switch kind {
	case kindCompleted:
		r.Completed += n
	case kindDead:
		r.Dead += n
	case kindAbandoned:
		r.Abandoned += n
	case kindDiscarded:
		r.Discarded += n
	case kindGone:
		r.Gone += n
	}
}

// LogValue is the report as a group of attributes.
func (r CleanupReport) LogValue() slog.Value {
	return slog.GroupValue(
		slog.Bool("finished", r.Finished), slog.Duration("took", r.Took),
		slog.Int64(kindCompleted, r.Completed), slog.Int64(kindDead, r.Dead), slog.Int64(kindAbandoned, r.Abandoned),
		slog.Int64(kindDiscarded, r.Discarded), slog.Int64(kindGone, r.Gone),
		slog.Int("days_made", r.DaysMade), slog.Int("days_dropped", r.DaysDropped),
		slog.Int("resumed", r.Resumed), slog.Int64("expired", r.Expired))
}

// tell logs and measures how a run ended.
func (c *Cleanup) tell(r *CleanupReport, err error) {
	result := "done"
	var refusal *ClockError
	switch {
	case errors.As(err, &refusal):
		result = "refused"
		c.cfg.Logger.Error("cleanup: refused, nothing was removed", "error", err, "database", refusal.Database, "offset", refusal.Offset, "leap", refusal.Leap)
	case err != nil:
		result = "error"
		c.cfg.Logger.Error("cleanup: ended with an error", "report", r, "error", err)
	case r.Skipped:
		result = "skipped"
		c.cfg.Logger.Info("cleanup: another cleaner is at work")
	case !r.Finished:
		result = "budget"
		c.cfg.Logger.Info("cleanup: the budget is used up, the next run goes on", "report", r, "with", c.next)
	default:
		c.cfg.Logger.Info("cleanup: done", "report", r)
	}
	c.cfg.Observer.Observe(commitbox.CleanupRuns, 1, result)
	c.cfg.Observer.Observe(commitbox.CleanupSeconds, r.Took.Seconds())
}
