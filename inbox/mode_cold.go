package inbox

import (
	"sync"
	"sync/atomic"
)

const (
	coldAfter = 1000 // look-ups in a row that found nothing
	coldEvery = 8    // of the messages then, one is looked up
)

// cold tells for each consumer whether its look-ups in the cache find anything. Where a thousand in a row did not, one in
// eight is enough to notice when copies begin to come: the table answers the others.
type cold struct{ misses sync.Map } // consumer to *atomic.Int64

func (c *cold) of(consumer string) *atomic.Int64 {
	n, ok := c.misses.Load(consumer)
	if !ok {
		n, _ = c.misses.LoadOrStore(consumer, new(atomic.Int64))
	}
	return n.(*atomic.Int64)
}

// ask says whether to look a message up. What the broker delivers again is looked up always.
func (c *cold) ask(m *Message) bool {
	n := c.of(m.ID.Consumer)
	return n.Load() < coldAfter || m.Delivery > 1 || n.Add(1)%coldEvery == 0
}

// tell takes in what a look-up found.
func (c *cold) tell(m *Message, found bool) {
	n := c.of(m.ID.Consumer)
	switch {
	case found:
		n.Store(0)
	case n.Load() < coldAfter:
		n.Add(1)
	}
}
