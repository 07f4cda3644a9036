package inbox

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/commitbox/commitbox/internal/db"
)

// snapshot is what a process knows at one time. It does not change, but for who uses it.
type snapshot struct {
	asked      time.Time // on this process's clock
	now        time.Time // the same on the database's
	version    int64
	unfollowed []int64              // versions of policies that were not understood
	agreed     int64                // the oldest version by which a replica works
	standings  map[string]*Standing // nil: there is a policy, but none that was ever understood
	identity   Identity
	trusted    bool // what is cached under the identity is true

	users atomic.Int64
	boxes sync.Map // boxKey to *Box
}

type boxKey struct {
	of       *Box
	consumer string
}

var errNoPolicy = errors.New("the consumer's policy is not known: the policies have not been read yet (call Policies.Load before the first message is handled), or this version does not understand it")

func standing(row *db.PolicyListRow) *Standing {
	return &Standing{
		Consumer: row.Consumer, Level: Mode(row.Mode).Level(), FromMode: Mode(row.FromMode), Version: row.Version,
		tableLeft: seconds(row.TableLeft), guardLeft: seconds(row.GuardLeft),
		Policy: Policy{
			Mode: Mode(row.Mode), StoreDown: StoreDown(row.StoreDown), Retention: seconds(row.Retention), DeadRetention: seconds(row.DeadRetention),
			RetryHorizon: seconds(row.RetryHorizon), AbandonAfter: seconds(row.AbandonAfter), Lease: seconds(row.Lease),
			MaxAttempts: int(row.MaxAttempts), BackoffBase: seconds(row.BackoffBase), BackoffMax: seconds(row.BackoffMax),
		},
	}
}

// of returns what holds for a consumer, with the stage of its last change now. lease counts where the policy has none.
func (s *snapshot) of(consumer string, lease time.Duration) Standing {
	found := s.standings[consumer]
	if found == nil {
		found = s.standings[EveryConsumer]
	}
	now := *found
	now.Consumer = consumer
	override(&lease, now.Lease)
	now.Stage = now.stage(time.Since(s.asked), s.agreed >= now.Version, lease)
	return now
}

// unknown says that a consumer has a policy that was never understood. That of the others may be weaker.
func (s *snapshot) unknown(consumer string) bool {
	found, ok := s.standings[consumer]
	return ok && found == nil
}

// followed returns the version up to which every policy is followed.
func (s *snapshot) followed() int64 {
	version := s.version
	for _, other := range s.unfollowed {
		version = min(version, other-1)
	}
	return version
}

func (s *snapshot) stale() bool { return time.Since(s.asked) > freshFor }

// pin returns the snapshot for a new call, which releases it at its end. It is nil before the first Load.
func (p *Policies) pin() *snapshot {
	for {
		s := p.current.Load()
		if s == nil {
			return nil
		}
		s.users.Add(1)
		if p.current.Load() == s {
			return s
		}
		s.release() // it was replaced, and may have been taken for unused
	}
}

func (s *snapshot) release() { s.users.Add(-1) }

// policy is how one call is guarded.
type policy struct {
	Standing
	guards
	snapshot *snapshot // nil: nothing is known, and nothing is handled
}

// under returns the box by whose settings a call for a consumer works, until the call is over.
func (b *Box) under(consumer string) (_ *Box, over func()) {
	if b.Policies == nil {
		return b, func() {}
	}
	if b.root != nil {
		b = b.root
	}
	s := b.Policies.pin()
	if s == nil {
		return b.with(policy{}), func() {}
	}
	if s.stale() {
		return b.with(s.policy(consumer, b)), s.release // it was not looked at for long: carefully, see policy
	}
	key := boxKey{b, consumer}
	if found, ok := s.boxes.Load(key); ok {
		return found.(*Box), s.release
	}
	found, _ := s.boxes.LoadOrStore(key, b.with(s.policy(consumer, b)))
	return found.(*Box), s.release
}

// policy returns how a consumer's messages are guarded. If nothing was heard for long, the mode may have changed: no copy is
// trusted, and both stores are used if this box has both.
func (s *snapshot) policy(consumer string, b *Box) policy {
	if s.unknown(consumer) {
		return policy{}
	}
	p := policy{Standing: s.of(consumer, b.LeaseFor), snapshot: s}
	p.guards = guardsOf(p.Mode, p.Stage)
	if s.stale() {
		if b.Guard != nil || p.Mode == ModeCache {
			p.guards = guardsOf(p.Mode, StageBoth)
		}
		p.front = false
	}
	p.front = p.front && s.trusted && b.Cache != nil
	return p
}

// with returns a box that works by a policy.
func (b *Box) with(p policy) *Box {
	derived := *b
	derived.root, derived.policy = b, &p
	p.applyTo(&derived.Config)
	return &derived
}
