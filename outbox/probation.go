package outbox

import (
	"context"
	"errors"
)

// A message that kills the process that publishes it counts no attempt and would kill one relay after the other. So
// shards that were taken over from a relay that died are on probation: their messages are tried one per shard at a time,
// each noted in the database before. Who takes such a shard over from a relay that died on probation finds the suspect
// there, and counts an attempt against it.

var errRelayDied = errors.New("the relay died while publishing it")

// examine puts shards that were taken over on probation, and defers what their former owners noted last.
func (l *lane) examine(ctx context.Context, fresh []*shard, unclean map[int16]int64) error {
	var noted []ref
	for _, s := range fresh {
		last, dirty := unclean[s.shard]
		if !dirty || l.examined[s.holding] {
			continue
		}
		l.probation[s.shard] = l.cfg.Batch
		if last > 0 {
			noted = append(noted, ref{shard: s.shard, id: last})
		}
	}
	if len(noted) > 0 {
		rows, err := l.link.read(ctx, noted)
		if err != nil {
			return err
		}
		verdicts := make([]verdict, len(rows))
		for i := range verdicts {
			verdicts[i] = verdict{resultRetryable, errRelayDied}
		}
		d := l.policy.decide(rows, verdicts)
		l.logFailures(rows, verdicts, d)
		if err := l.apply(ctx, d.change); err != nil {
			return err
		}
	}
	for _, s := range fresh {
		l.examined[s.holding] = true
	}
	return nil
}

// mark notes what is about to be tried of shards on probation.
func (l *lane) mark(ctx context.Context, d *delivery, ready []int) error {
	var c change
	for _, i := range ready {
		if _, on := l.probation[d.rows[i].shard]; on {
			c.probes = append(c.probes, d.rows[i].ref)
		}
	}
	return l.apply(ctx, c)
}

// release ends the probation of shards of which nothing is left to be read, or as many messages have been tried as the
// former owner may have had in flight.
func (l *lane) release(ctx context.Context, read, left []row) error {
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
	return nil
}
