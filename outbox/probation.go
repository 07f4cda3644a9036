package outbox

import (
	"context"
	"errors"
)

// A message that kills the process that publishes it counts no attempt and would kill one relay after the other. So
// shards that were taken over from a relay that died are on probation: their messages are tried one per shard at a time,
// and noted in the database before. If the relay dies again, the next owner finds the notes and tries those messages
// alone; if it dies over one, the owner after that counts an attempt against it. From then on the message is always
// tried alone and noted, so that every further death counts.

var errRelayDied = errors.New("the relay died while publishing it")

// alone says whether a message has to be tried in a call of its own.
func (l *lane) alone(r *row) bool { return r.deadly || l.accused[r.origin()] }

// isolate takes the messages that have to be tried alone out of their waves, and puts them before the others. A round ends
// after one of them, so that it is settled before anything else is sent: what a relay had confirmed and not deleted when it
// died would be blamed with the guilty.
func (l *lane) isolate(rows []row, batches [][]int) [][]int {
	var apart [][]int
	for _, wave := range batches {
		var rest []int
		for _, i := range wave {
			if l.alone(&rows[i]) {
				apart = append(apart, []int{i})
			} else {
				rest = append(rest, i)
			}
		}
		apart = append(apart, rest)
	}
	return apart
}

// examine puts shards that were taken over on probation, and deals with what their former owners noted last.
func (l *lane) examine(ctx context.Context, fresh []*shard, unclean map[int16]probe) error {
	var dead []ref
	for _, s := range fresh {
		last, dirty := unclean[s.shard]
		if !dirty || l.examined[s.shard] {
			continue
		}
		l.probation[s.shard] = l.cfg.Batch
		switch {
		case last.alone:
			dead = append(dead, ref{shard: s.shard, id: last.id})
		case last.id > 0:
			l.accused[ref{shard: s.shard, id: last.id}] = true
		}
	}
	if err := l.convict(ctx, dead); err != nil {
		return err
	}
	for _, s := range fresh {
		l.examined[s.shard] = true
	}
	return nil
}

// convict counts an attempt against messages over which a relay died, and takes the notes of them away.
func (l *lane) convict(ctx context.Context, dead []ref) error {
	if len(dead) == 0 {
		return nil
	}
	rows, err := l.link.read(ctx, dead)
	if err != nil {
		return err
	}
	verdicts := make([]verdict, len(rows))
	for i := range verdicts {
		verdicts[i] = verdict{resultRetryable, errRelayDied}
	}
	d := l.policy.decide(rows, verdicts)
	l.logFailures(rows, verdicts, d)
	for _, r := range dead {
		d.change.probes = append(d.change.probes, probe{shard: r.shard})
	}
	return l.apply(ctx, d.change)
}

// note writes down what is about to be tried, where it may be what killed a relay.
func (l *lane) note(ctx context.Context, d *delivery, ready []int) error {
	var c change
	for _, i := range ready {
		r := &d.rows[i]
		if _, on := l.probation[r.shard]; on || l.alone(r) {
			c.probes = append(c.probes, probe{r.shard, r.id, l.alone(r)})
		}
	}
	return l.apply(ctx, c)
}

// strike takes away the notes of messages that were tried alone, and survived.
func (l *lane) strike(c *change, rows []row, verdicts []verdict) {
	for i := range rows {
		if l.alone(&rows[i]) && verdicts[i].result != resultNotTried {
			c.probes = append(c.probes, probe{shard: rows[i].shard})
			delete(l.accused, rows[i].origin())
		}
	}
}

// discharge ends the probation of shards of which nothing is left to be read, or as many messages have been tried as
// the former owner may have had in flight.
func (l *lane) discharge(ctx context.Context, read, left []row) error {
	if len(l.probation) == 0 {
		return nil
	}
	tried, waiting := make(map[int16]int), make(map[int16]bool)
	for i := range read {
		tried[read[i].shard]++
	}
	for i := range left {
		waiting[left[i].shard] = true
	}
	var c change
	for shard := range l.probation {
		if waiting[shard] {
			continue
		}
		if l.probation[shard] -= tried[shard]; tried[shard] == 0 || l.probation[shard] <= 0 {
			c.clean = append(c.clean, shard)
		}
	}
	if err := l.apply(ctx, c); err != nil {
		return err
	}
	for _, shard := range c.clean {
		delete(l.probation, shard)
	}
	if len(l.probation) == 0 {
		clear(l.accused)
	}
	return nil
}
