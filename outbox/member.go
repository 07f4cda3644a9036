package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/commitbox/commitbox"
)

// member is a relay's membership in its channel: an owner id that is never used again, and a lease.
type member struct {
	cfg   RelayConfig
	store store
	owner uuid.UUID
	lease *lease
}

var errLeaseLost = errors.New("outbox: the relay's lease has ended")

// join makes the relay a member.
func join(ctx context.Context, cfg RelayConfig, store store) (*member, error) {
	sent := time.Now()
	owner := uuid.New()
	if err := store.join(ctx, owner); err != nil {
		return nil, fmt.Errorf("outbox: join channel %s: %w", cfg.Channel, err)
	}
	cfg.Logger.Info("outbox: relay has joined", "channel", cfg.Channel, "owner", owner)
	return &member{cfg, store, owner, newLease(cfg, sent)}, nil
}

// beat renews the lease until ctx ends. It calls lost when the lease has ended, here or in the database.
func (m *member) beat(ctx context.Context, lost context.CancelCauseFunc) {
	for wait := m.cfg.Renew; sleep(ctx, wait); {
		sent := time.Now()
		held, err := m.renew(ctx)
		wait = m.cfg.Renew
		switch {
		case ctx.Err() != nil:
			return
		case err == nil && held:
			m.lease.renewed(sent)
		case err == nil || m.lease.left(time.Now()) <= 0:
			m.cfg.Observer.Observe(commitbox.OutboxErrors, 1, m.cfg.Channel, "lease_lost")
			lost(errors.Join(errLeaseLost, err))
			return
		default:
			m.cfg.Logger.Warn("outbox: lease not renewed", "channel", m.cfg.Channel, "owner", m.owner, "error", err)
			wait = m.cfg.Renew / 4
		}
	}
}

func (m *member) renew(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, m.cfg.RenewTimeout)
	defer cancel()
	return m.store.renew(ctx, m.owner)
}

// leave hands the shards over, whether or not ctx has ended.
func (m *member) leave(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), settleLimit)
	defer cancel()
	m.cfg.Observer.Observe(commitbox.OutboxOwnedShards, 0, m.cfg.Channel)
	return m.store.leave(ctx, m.owner)
}
