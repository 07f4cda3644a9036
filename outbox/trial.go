package outbox

import (
	"context"
	"time"
)

// How a lane finds out whether its destination is away, or only some of its messages say so.

const (
	peekPages = 20     // pages that a trial reads past messages that found the destination away
	awayMax   = 10_000 // topics that are remembered as away
)

// round is what one round has met.
type round struct {
	trial       bool  // it tries for all lanes whether the destination is back
	confirmed   bool  // a message got through
	away        error // a call in which the destination took nothing
	unavailable []ref // messages that found the destination away
}

// conclude draws the consequences of a round. Where some messages got through, the destination is not away: those that
// say so nevertheless are suspected of a failure of their own.
func (l *lane) conclude() {
	for _, r := range l.round.unavailable {
		l.suspects[r] += 0
	}
	if l.round.confirmed {
		for r := range l.suspects {
			l.suspects[r]++
		}
		l.peek, l.passed = nil, nil
	}
	l.breaker.tell(time.Now(), l.round.trial, l.round.confirmed, l.round.away)
}

// lookPast makes the next trial read what lies above rows that found the destination away, so that a page of messages of
// one topic that is away cannot hide all others.
func (l *lane) lookPast(resolved int64, rows []row) {
	if l.round.away == nil || l.round.confirmed || len(rows) == 0 {
		return
	}
	l.peek, l.passed = make(map[int16]int64), make(map[string]bool)
	l.pass(resolved, rows)
	if len(l.awayTopics) > awayMax {
		clear(l.awayTopics)
	}
}

// pass goes past rows, and the keys of which they are. Like a floor it stays below what may still appear.
func (l *lane) pass(resolved int64, rows []row) {
	for i := range rows {
		l.peek[rows[i].shard] = max(l.peek[rows[i].shard], min(rows[i].id, resolved))
		l.passed[rows[i].Key] = true
	}
	delete(l.passed, "")
}

// peekOn sends a few of the rows that lie above others, to see whether the destination takes them: of keys that have nothing
// below, and of topics that did not find it away. It reads on while there are none; if there are none at all, it starts
// again from the floors. These stay where they are.
func (l *lane) peekOn(ctx context.Context, resolved int64) (sent bool, err error) {
	var free, rows []row
	defer func() { clear(rows) }()
	for range peekPages {
		if rows, err = l.link.poll(ctx, l.cursors(), l.cfg.BatchBytes); err != nil {
			return false, err
		}
		for _, r := range rows {
			if s := l.find(r.shard); s != nil && !l.passed[r.Key] && !s.blocked[r.Key] && !l.awayTopics[r.Topic] {
				free = append(free, r)
			}
		}
		if len(free) > 0 || len(rows) == 0 {
			break
		}
		l.pass(resolved, rows)
	}
	if len(free) == 0 {
		l.peek, l.passed = nil, nil
		return false, nil
	}
	l.more = true
	_, err = l.publishAndSettle(ctx, free[:min(len(free), trialSize)], nil)
	return true, err
}
