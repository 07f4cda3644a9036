package outbox

import "time"

// horizon finds the position below which no message can appear any more.
//
// Positions are drawn before their transactions commit, and transactions commit in any order. A candidate is the last
// position that was drawn; it is final once every transaction that was open right after it was read has ended. A
// transaction that stays open for longer than maxAge is not waited for: it counts as leaked, and when it ends, what was
// read past it has to be read again.
type horizon struct {
	maxAge time.Duration

	resolved  int64               // nothing can appear at or below it, but for leaked writers
	candidate int64               // becomes resolved when waiting is empty
	waiting   map[string]struct{} // nil: there is no candidate
	open      map[string]openWriter
}

type openWriter struct {
	pid    int32
	seen   time.Time // first sight
	leaked bool
}

// observe takes in the last position and the writers that were open after it was read. It returns those that have
// leaked just now, and whether one that had leaked before has ended.
func (h *horizon) observe(now time.Time, position int64, writers []writer) (leaked []openWriter, leakEnded bool) {
	leaked, leakEnded = h.track(now, writers)
	for id := range h.waiting {
		if w, still := h.open[id]; !still || w.leaked {
			delete(h.waiting, id)
		}
	}
	if h.waiting != nil && len(h.waiting) == 0 {
		h.resolved, h.waiting = h.candidate, nil
	}
	if h.waiting == nil {
		h.candidate, h.waiting = position, make(map[string]struct{})
		for id, w := range h.open {
			if !w.leaked {
				h.waiting[id] = struct{}{}
			}
		}
		if len(h.waiting) == 0 {
			h.resolved, h.waiting = position, nil
		}
	}
	return leaked, leakEnded
}

// track keeps the first sight of every open writer.
func (h *horizon) track(now time.Time, writers []writer) (leaked []openWriter, leakEnded bool) {
	open := make(map[string]openWriter, len(writers))
	for _, w := range writers {
		known, ok := h.open[w.id]
		if !ok {
			known = openWriter{pid: w.pid, seen: now}
		}
		if !known.leaked && now.Sub(known.seen) > h.maxAge {
			known.leaked = true
			leaked = append(leaked, known)
		}
		open[w.id] = known
	}
	for id, w := range h.open {
		if _, still := open[id]; !still && w.leaked {
			leakEnded = true
		}
	}
	h.open = open
	return leaked, leakEnded
}

// leaks counts the open writers that are not waited for.
func (h *horizon) leaks() int {
	n := 0
	for _, w := range h.open {
		if w.leaked {
			n++
		}
	}
	return n
}

// advance returns a shard's next floor: as far up as no message that is still in hot, and none that may still appear, is
// passed. resolved was known before the shard was read; read are the positions that were read; remaining is the lowest
// of those that are still in hot, 0 if there is none; exhausted says that nothing lay above them.
func advance(floor, resolved int64, read []row, remaining int64, exhausted bool) int64 {
	next := floor
	switch {
	case remaining > 0:
		next = min(resolved, remaining-1)
	case exhausted:
		next = resolved
	case len(read) > 0:
		next = min(resolved, read[len(read)-1].id)
	}
	return max(floor, next)
}

// fairLimits sets how many messages to read next from each shard: a shard that filled its limit gets the double, one
// that did not gets half, none less than 1, and all together at most batch. So one busy key can use a whole batch, and
// no shard waits for another.
func fairLimits(limits []int32, got []int, batch int) {
	sum := 0
	for i := range limits {
		if got[i] >= int(limits[i]) {
			limits[i] = int32(min(int(limits[i])*2, batch))
		} else {
			limits[i] = max(limits[i]/2, 1)
		}
		sum += int(limits[i])
	}
	if sum <= batch {
		return
	}
	for i := range limits {
		limits[i] = int32(max(int(limits[i])*batch/sum, 1))
	}
}
