package outbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"strconv"
	"time"

	"github.com/commitbox/commitbox"
)

// verdict is what became of one row.
type verdict struct {
	result result
	err    error
}

const (
	trialSize    = 8 // messages that are sent to see whether a destination is back
	suspectLimit = 3 // in how many rounds a message may find the destination away while others get through
)

// waves splits rows into batches that hold at most one message of each group, in order: wave n has the n-th of each.
// Rows of no group are all in the first. With keys as groups, positional answers of a broker cannot break their order.
func waves(rows []row, group func(*row) string) [][]int {
	var batches [][]int
	nth := make(map[string]int, len(rows))
	for i := range rows {
		n := 0
		if g := group(&rows[i]); g != "" {
			n = nth[g]
			nth[g]++
		}
		if n == len(batches) {
			batches = append(batches, nil)
		}
		batches[n] = append(batches[n], i)
	}
	return batches
}

func byKey(r *row) string { return r.Key }

// byShard is for shards on probation: one message of each is tried at a time.
func byShard(r *row) string { return strconv.Itoa(int(r.shard)) }

func together(*row) string { return "" }

// split chooses how rows are sent.
func (l *lane) split(rows []row) [][]int {
	alone := false
	for i := range rows {
		alone = alone || l.alone(&rows[i])
	}
	switch {
	case len(l.probation) > 0:
		return l.isolate(rows, waves(rows, byShard))
	case alone:
		return l.isolate(rows, waves(rows, byKey))
	case l.keepsOrder:
		return waves(rows, together)
	}
	return waves(rows, byKey)
}

// delivery is one attempt to publish rows.
type delivery struct {
	rows     []row
	verdicts []verdict
	stopped  map[string]bool // keys of which a message was not confirmed
}

// deliver publishes rows and says what became of each. A key whose message was not confirmed takes no part in later
// waves. It stops early when the destination is away, the relay is to stop, or the lease may end under the next call;
// what is left is not tried.
func (l *lane) deliver(ctx context.Context, rows []row) (*delivery, error) {
	d := &delivery{rows: rows, verdicts: make([]verdict, len(rows)), stopped: make(map[string]bool)}
	for i := range d.verdicts {
		d.verdicts[i] = verdict{resultNotTried, ErrNotTried}
	}
	for _, wave := range l.split(rows) {
		ready := l.order(d, wave)
		if len(ready) == 0 {
			continue
		}
		if !l.maySend(ctx) {
			break
		}
		if err := l.note(ctx, d, ready); err != nil {
			return nil, err
		}
		if !l.maySend(ctx) { // noting may have taken long
			break
		}
		batch := make([]Record, len(ready))
		for n, i := range ready {
			batch[n] = rows[i].Record
		}
		verdicts, err := l.publish(ctx, batch)
		if err != nil {
			return nil, err
		}
		alone := l.alone(&rows[ready[0]])
		if away := l.take(d, ready, verdicts); away || alone || l.round.trial {
			break
		}
	}
	return d, nil
}

// maySend says that a call may begin: it has PublishTimeout before the lease ends.
func (l *lane) maySend(ctx context.Context) bool {
	return ctx.Err() == nil && l.lease.left(time.Now()) >= l.cfg.PublishTimeout
}

// order says what of a wave is to be sent: not what waits for its key, not what cannot be read, and last what has found
// the destination away before, so that others can show that it is not.
func (l *lane) order(d *delivery, wave []int) []int {
	var ready, suspects []int
	suspect := make(map[string]bool)
	for _, i := range wave {
		r := &d.rows[i]
		_, known := l.suspects[r.origin()]
		switch {
		case d.stopped[r.Key]:
		case r.bad != nil:
			d.verdicts[i] = verdict{resultPermanent, r.bad}
			d.stopped[r.Key] = r.Key != ""
		case known, suspect[r.Key]:
			suspect[r.Key] = r.Key != ""
			suspects = append(suspects, i)
		default:
			ready = append(ready, i)
		}
	}
	ready = append(ready, suspects...)
	if l.round.trial {
		ready = ready[:min(len(ready), trialSize)]
	}
	return ready
}

// take records the answers of one call, and says whether the destination took nothing because it is away. A message that
// was the only one to find it away in several rounds has a failure of its own.
func (l *lane) take(d *delivery, sent []int, verdicts []verdict) (away bool) {
	some := false
	for n, i := range sent {
		r, v := &d.rows[i], verdicts[n]
		switch {
		case v.result != resultUnavailable:
			delete(l.suspects, r.origin())
			delete(l.awayTopics, r.Topic)
		case l.suspects[r.origin()] >= suspectLimit:
			v = verdict{resultRetryable, v.err}
		default:
			l.round.unavailable = append(l.round.unavailable, r.origin())
			l.awayTopics[r.Topic] = true
			away, l.round.away = true, v.err
		}
		some = some || v.result == resultOK
		if v.result != resultOK && d.stopped[r.Key] {
			v = verdict{resultNotTried, ErrNotTried} // the first of its key that failed decides
		}
		d.verdicts[i] = v
		if v.result != resultOK && r.Key != "" {
			d.stopped[r.Key] = true
		}
	}
	return away && !some
}

// ErrPublishStalled ends a relay whose Publish call did not come back after its context had ended. The relay has stopped
// renewing its lease and hands nothing back, because the call may still send; another relay takes over when the lease
// has ended. The process should be restarted: the call's goroutine is still there.
var ErrPublishStalled = errors.New("outbox: Publish did not return after its context had ended")

// publish calls the publisher with no transaction open. The call is not cut short when the relay is to stop: it has
// PublishTimeout, then Guard to come back.
func (l *lane) publish(ctx context.Context, batch []Record) ([]verdict, error) {
	timeout := min(l.cfg.PublishTimeout, l.lease.left(time.Now()))
	call, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	defer cancel()
	answer := make(chan []error, 1)
	started := time.Now()
	go l.call(call, batch, answer)
	overdue := time.NewTimer(timeout + l.cfg.Guard)
	defer overdue.Stop()
	errs, ok := answered(answer, overdue.C)
	if !ok {
		return nil, fmt.Errorf("%w: %d messages in flight, first id %s", ErrPublishStalled, len(batch), batch[0].ID)
	}
	l.cfg.Observer.Observe(commitbox.OutboxPublishSeconds, time.Since(started).Seconds(), l.cfg.Channel)
	return l.read(batch, errs), nil
}

// answered waits for an answer until it is overdue. A process that stood still for long finds both, and has its answer.
func answered(answer <-chan []error, overdue <-chan time.Time) ([]error, bool) {
	select {
	case errs := <-answer:
		return errs, true
	case <-overdue:
	}
	select {
	case errs := <-answer:
		return errs, true
	default:
		return nil, false
	}
}

// call sends the publisher's answer; a panic or a Goexit is an answer of the wrong length.
func (l *lane) call(ctx context.Context, batch []Record, answer chan<- []error) {
	var errs []error
	returned := false
	defer func() {
		if p := recover(); !returned {
			l.cfg.Logger.Error("outbox: publisher panicked", "panic", fmt.Sprint(p), "first_id", batch[0].ID, "stack", string(debug.Stack()))
			l.cfg.Observer.Observe(commitbox.OutboxErrors, 1, l.cfg.Channel, "panic")
		}
		answer <- errs
	}()
	errs = l.publisher.Publish(ctx, batch)
	returned = true
}

// judge reads one answer. An error that panics when it is asked, such as a nil pointer in an interface, is one all the same.
func judge(err error) (v verdict) {
	defer func() {
		if p := recover(); p != nil {
			v = verdict{resultRetryable, fmt.Errorf("publisher gave an error that panics: %v", p)}
		}
	}()
	if err == nil {
		return verdict{}
	}
	return verdict{kindOf(err), errors.New(err.Error())}
}

// read classifies the answers of one call and counts them.
func (l *lane) read(batch []Record, errs []error) []verdict {
	verdicts := make([]verdict, len(batch))
	var counts [resultNotTried + 1]int
	now, channel := time.Now(), []string{l.cfg.Channel}
	for i := range batch {
		if len(errs) == len(batch) {
			verdicts[i] = judge(errs[i])
		} else {
			verdicts[i] = verdict{resultRetryable, fmt.Errorf("publisher gave %d answers for %d messages", len(errs), len(batch))}
		}
		counts[verdicts[i].result]++
		if verdicts[i].result == resultOK {
			l.cfg.Observer.Observe(commitbox.OutboxLagSeconds, now.Sub(batch[i].EnqueuedAt).Seconds(), channel...)
		}
	}
	for r, n := range counts {
		if n > 0 {
			l.cfg.Observer.Observe(commitbox.OutboxPublished, float64(n), l.cfg.Channel, result(r).String())
		}
	}
	return verdicts
}
