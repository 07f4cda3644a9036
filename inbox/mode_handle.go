package inbox

import (
	"context"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/schema"
)

// under takes the settings by which this call works.
func (h *handling) under() (over func()) {
	if h.box == nil {
		return func() {}
	}
	box, over := h.box.under(h.msg.ID.Consumer)
	h.settings = &box.settings
	return over
}

// byMode is handle for a box that works by a policy. The row is written in every mode but off, because nobody here learns
// whether the caller commits: a token could never be finished, and a cache never filled with what this call did. What a
// duplicate reads in a transaction that has written nothing is committed, and fills it.
func (h *handling) byMode(ctx context.Context, run func(context.Context) ([]byte, error)) verdict {
	if h.policy != nil && h.policy.Mode == ModeOff {
		h.bare = true
		h.Observer.Observe(commitbox.InboxUnguarded, 1, h.msg.ID.Consumer, "off")
		v := h.handle(ctx, run)
		v.by = ByOff
		return v
	}
	asked, known := h.knownElsewhere(ctx, &h.msg)
	if known {
		return asked
	}
	v := h.handle(ctx, run)
	if !asked.away {
		h.fill(ctx, h.msg.ID, v.copy)
	}
	return v
}

// claimNothing sets the savepoint of a handler that nothing guards.
func (h *handling) claimNothing(ctx context.Context) (*claim, verdict) {
	if h.savepoint {
		if _, err := h.tx.Exec(ctx, schema.Savepoint); err != nil {
			return nil, unavailable(err)
		}
	}
	return new(claim), verdict{}
}
