package outbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/commitbox/commitbox"
)

// verdict is what became of one row.
type verdict struct {
	result result
	err    error
}

// waves splits rows into batches that hold at most one message per key, in order: wave n has the n-th message of each
// key. Rows without a key are all in the first. Positional answers of a broker then cannot break the order of a key.
func waves(rows []row) [][]int {
	var batches [][]int
	nth := make(map[string]int, len(rows))
	for i := range rows {
		n := 0
		if key := rows[i].Key; key != "" {
			n = nth[key]
			nth[key]++
		}
		if n == len(batches) {
			batches = append(batches, nil)
		}
		batches[n] = append(batches[n], i)
	}
	return batches
}

// deliver publishes rows and says what became of each. A key whose message was not confirmed takes no part in later
// waves. It stops early when the destination is away, the relay is to stop, or the lease may end under the next call;
// what is left is not tried.
func (l *lane) deliver(ctx context.Context, rows []row) ([]verdict, error) {
	verdicts := make([]verdict, len(rows))
	for i := range verdicts {
		verdicts[i] = verdict{resultNotTried, ErrNotTried}
	}
	stopped := make(map[string]bool)
	for _, wave := range waves(rows) {
		var sent []int
		var batch []Record
		for _, i := range wave {
			switch r := &rows[i]; {
			case stopped[r.Key]:
			case r.bad != nil:
				verdicts[i] = verdict{resultPermanent, r.bad}
				stopped[r.Key] = r.Key != ""
			default:
				sent, batch = append(sent, i), append(batch, r.Record)
			}
		}
		if len(batch) == 0 {
			continue
		}
		if ctx.Err() != nil || l.lease.left(time.Now()) < l.cfg.PublishTimeout {
			break
		}
		results, err := l.publish(ctx, batch)
		if err != nil {
			return nil, err
		}
		away := false
		for n, i := range sent {
			verdicts[i] = results[n]
			if results[n].result != resultOK && rows[i].Key != "" {
				stopped[rows[i].Key] = true
			}
			away = away || results[n].result == resultUnavailable
		}
		if away {
			break
		}
	}
	return verdicts, nil
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
	select {
	case errs := <-answer:
		l.cfg.Observer.Observe(commitbox.OutboxPublishSeconds, time.Since(started).Seconds(), l.cfg.Channel)
		return l.read(batch, errs), nil
	case <-overdue.C:
		return nil, fmt.Errorf("%w: %d messages in flight, first id %s", ErrPublishStalled, len(batch), batch[0].ID)
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

// read classifies the answers of one call and counts them.
func (l *lane) read(batch []Record, errs []error) []verdict {
	verdicts := make([]verdict, len(batch))
	var counts [resultNotTried + 1]int
	for i := range batch {
		if len(errs) == len(batch) {
			verdicts[i] = verdict{kindOf(errs[i]), errs[i]}
		} else {
			verdicts[i] = verdict{resultRetryable, fmt.Errorf("publisher gave %d answers for %d messages", len(errs), len(batch))}
		}
		counts[verdicts[i].result]++
		if verdicts[i].result == resultOK {
			l.cfg.Observer.Observe(commitbox.OutboxLagSeconds, time.Since(batch[i].EnqueuedAt).Seconds(), l.cfg.Channel)
		}
	}
	for r, n := range counts {
		if n > 0 {
			l.cfg.Observer.Observe(commitbox.OutboxPublished, float64(n), l.cfg.Channel, result(r).String())
		}
	}
	return verdicts
}
