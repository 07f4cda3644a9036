package inbox

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

const (
	policyEvery   = 700 * time.Millisecond // so that a change is followed within two seconds, a slow answer included
	policyTimeout = 5 * time.Second
	complainEvery = time.Minute
)

// PoliciesConfig holds the settings of [Policies]. The zero value is usable.
type PoliciesConfig struct {
	Schema   string             // default "commitbox"
	Replica  string             // the name of this process among its replicas, 1 to 200 bytes; default: its host and a random part
	Observer commitbox.Observer // default: commitbox.Discard
	Logger   *slog.Logger       // default: slog.Default()
}

// Policies follows the table commitbox.inbox_policy for the boxes of one process that have it in their Config. Every call
// of a box works by what was known when it began. It is safe for concurrent use.
//
// Every program that handles messages of a consumer whose mode is not postgres needs one: a box without it works in mode
// postgres, whatever the table says.
type Policies struct {
	PoliciesConfig
	pool    *pgxpool.Pool
	queries *db.Queries

	current atomic.Pointer[snapshot]

	mu       sync.Mutex // held while the table is read
	former   []*snapshot
	witness  witness
	problem  string // the last one that was logged
	loggedAt time.Time
}

// NewPolicies returns Policies for the database of a pool. It sends nothing: call Load before the first message is
// handled, and Run beside the consumers.
func NewPolicies(pool *pgxpool.Pool, cfg PoliciesConfig) (*Policies, error) {
	if cfg.Replica == "" {
		host, _ := os.Hostname()
		cfg.Replica = check.Clean(host, 100) + " " + uuid.NewString()
	}
	if cfg.Observer == nil {
		cfg.Observer = commitbox.Discard
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	name, err := schema.Parse(cfg.Schema)
	if err != nil {
		err = &commitbox.InputError{Field: "PoliciesConfig.Schema", Problem: err.Error()}
	}
	err = errors.Join(err, check.Text("PoliciesConfig.Replica", cfg.Replica, consumerLenMax))
	if pool == nil {
		err = errors.Join(&commitbox.InputError{Field: "pool", Problem: "is nil"}, err)
	}
	if err != nil {
		return nil, err
	}
	return &Policies{PoliciesConfig: cfg, pool: pool, queries: db.New(name.On(pool))}, nil
}

// Run follows the table until ctx ends, looking at it at least once a second, and says there by which version this
// process works, so that a change of a mode can wait for it. End it after the last call of a box has returned. An error
// of the database is reported and the last policies stay; after 15 s without an answer, calls use every store that some
// other replica may be using. Not promised: that all replicas work by one version at one time; see Modes.
func (p *Policies) Run(ctx context.Context) error {
	for {
		_ = p.Load(context.WithoutCancel(ctx)) // it has been reported; cut off, it could still write this replica's row after its removal
		if !sleep(ctx, policyEvery) {
			break
		}
	}
	ctx, cancel := detached(ctx)
	defer cancel()
	return p.queries.PolicyForgetReplicas(ctx, p.Replica)
}

// Load reads the table now. A policy that this version does not understand is reported and the one before it stays; if there
// was none, the consumer's messages are refused with ErrUnavailable. The error then says so, and that of a database that does
// not answer as well. Not promised: that a change is followed at the same moment elsewhere.
func (p *Policies) Load(ctx context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, policyTimeout)
	defer cancel()
	next, err := p.read(ctx)
	if next != nil {
		p.follow(next)
		err = errors.Join(err, p.queries.PolicyBeat(ctx, db.PolicyBeatParams{Replica: p.Replica, Version: p.oldest()}))
		if err == nil {
			p.Observer.Observe(commitbox.InboxPolicyVersion, float64(next.version))
		}
	}
	if err != nil {
		p.complain(ctx, err)
	}
	return err
}

// read makes a snapshot of what the database says. There is none if the database did not answer.
func (p *Policies) read(ctx context.Context) (*snapshot, error) {
	asked := time.Now()
	state, err := p.queries.PolicyState(ctx, aliveFor.Seconds())
	if err != nil {
		return nil, err
	}
	rows, err := p.queries.PolicyList(ctx)
	if err != nil {
		return nil, err
	}
	next := &snapshot{asked: asked, now: state.Now, agreed: state.Agreed, standings: make(map[string]*Standing, len(rows))}
	next.identity = Identity{System: uint64(state.System), Timeline: uint32(state.Timeline), Generation: state.Generation}
	var problems []error
	for i := range rows {
		s := standing(&rows[i])
		next.version = max(next.version, s.Version)
		if err := s.check(); err != nil {
			problems = append(problems, err)
			next.unfollowed = append(next.unfollowed, s.Version)
			next.standings[s.Consumer] = p.lastGood(s.Consumer)
			continue
		}
		next.standings[s.Consumer] = s
	}
	if next.standings[EveryConsumer] == nil {
		return nil, errors.Join(append(problems, errNoStandard)...)
	}
	next.trusted = p.witness.learn(next.identity, uint64(state.Lsn))
	if !next.trusted {
		problems = append(problems, errRestored)
	}
	return next, errors.Join(problems...)
}

var (
	errNoStandard = errors.New("there is no usable policy of '*'")
	errRestored   = errors.New("the database is older than it was: it has been restored; call cache_rotate, until then nothing cached is used")
)

func (p *Policies) lastGood(consumer string) *Standing {
	if s := p.current.Load(); s != nil {
		return s.standings[consumer]
	}
	return nil
}

// follow makes a snapshot the one by which new calls work.
func (p *Policies) follow(next *snapshot) {
	if last := p.current.Swap(next); last != nil {
		p.former = append(p.former, last)
	}
	p.former = slices.DeleteFunc(p.former, func(s *snapshot) bool { return s.users.Load() == 0 })
}

// oldest returns the lowest version by which a call is working.
func (p *Policies) oldest() int64 {
	lowest := p.current.Load().followed()
	for _, s := range p.former {
		lowest = min(lowest, s.followed())
	}
	return lowest
}

// complain counts a problem, and logs it when it is another one than before, or after a while.
func (p *Policies) complain(ctx context.Context, err error) {
	kind := "database"
	var input *commitbox.InputError
	switch {
	case errors.Is(err, context.Canceled):
		return
	case errors.Is(err, errRestored):
		kind = "restored"
	case errors.As(err, &input), errors.Is(err, errNoStandard):
		kind = "invalid"
	}
	p.Observer.Observe(commitbox.InboxPolicyErrors, 1, kind)
	if text := err.Error(); text != p.problem || time.Since(p.loggedAt) > complainEvery {
		p.problem, p.loggedAt = text, time.Now()
		p.Logger.ErrorContext(ctx, "inbox: the policies could not be followed; the last good ones stay", "kind", kind, "error", text)
	}
}

// Get returns what holds for a consumer, as this process knows it. Not promised: that the table still says so.
func (p *Policies) Get(consumer string) (Standing, error) {
	s := p.current.Load()
	if s == nil || s.unknown(consumer) {
		return Standing{}, errNoPolicy
	}
	return s.of(consumer, standard.LeaseFor), nil
}

// List returns what holds for each consumer that has a policy of its own, and for the others, as this process knows it.
// Not promised: that the table still says so.
func (p *Policies) List() []Standing {
	s := p.current.Load()
	if s == nil {
		return nil
	}
	list := make([]Standing, 0, len(s.standings))
	for consumer := range s.standings {
		if !s.unknown(consumer) {
			list = append(list, s.of(consumer, standard.LeaseFor))
		}
	}
	slices.SortFunc(list, func(a, b Standing) int { return strings.Compare(a.Consumer, b.Consumer) })
	return list
}

// Set writes the policy of a consumer, or of [EveryConsumer], and returns its version. All fields are written, so take
// what was there from the table if only one is to change; from SQL, inbox_policy_set changes single columns. Replicas
// follow within two seconds. The reason is written to the audit table; it may be empty. A policy that would forget a
// message while it may still be delivered is refused with an [*commitbox.InputError]. Not promised: that a mode counts
// at once: its change passes through stages.
func (p *Policies) Set(ctx context.Context, consumer string, policy Policy, reason string) (version int64, err error) {
	if err := errors.Join(check.Text("consumer", consumer, consumerLenMax), checkReason(reason)); err != nil {
		return 0, err
	}
	change, err := json.Marshal(policy.columns())
	if err != nil {
		return 0, err
	}
	version, err = p.queries.PolicySet(ctx, db.PolicySetParams{Consumer: consumer, Change: string(change), Reason: optional(reason)})
	if state := sqlState(err); strings.HasPrefix(state, "22") || strings.HasPrefix(state, "23") {
		err = errors.Join(&commitbox.InputError{Field: "policy", Problem: "is refused"}, err)
	}
	return version, err
}

// columns returns a policy as the table's columns: null where it inherits.
func (p *Policy) columns() map[string]any {
	columns := map[string]any{
		"mode": nil, "store_down": nil, "retention": interval(p.Retention), "dead_retention": interval(p.DeadRetention),
		"retry_horizon": interval(p.RetryHorizon), "abandon_after": interval(p.AbandonAfter), "lease": interval(p.Lease),
		"max_attempts": nil, "backoff_base": interval(p.BackoffBase), "backoff_max": interval(p.BackoffMax),
	}
	if p.Mode != "" {
		columns["mode"] = p.Mode
	}
	if p.StoreDown != "" {
		columns["store_down"] = p.StoreDown
	}
	if p.MaxAttempts != 0 {
		columns["max_attempts"] = p.MaxAttempts
	}
	return columns
}

func interval(d time.Duration) any {
	if d == 0 {
		return nil
	}
	return strconv.FormatFloat(d.Seconds(), 'f', 6, 64) + " seconds"
}

// Forget ends a consumer's change of mode at once, and says whether there was one. What only the former mode's store knows
// is not asked any more and may run again. The reason is written to the audit table; it may be empty. Not promised: one
// effect for those.
func (p *Policies) Forget(ctx context.Context, consumer, reason string) (bool, error) {
	if err := errors.Join(check.Text("consumer", consumer, consumerLenMax), checkReason(reason)); err != nil {
		return false, err
	}
	forgotten, err := p.queries.PolicyForget(ctx, db.PolicyForgetParams{Consumer: consumer, Reason: optional(reason)})
	if err == nil && forgotten {
		p.Observer.Observe(commitbox.InboxUnguarded, 1, consumer, "forgotten")
	}
	return forgotten, err
}

// RotateCache makes every cached copy of a row a miss, on every replica within two seconds. It is part of a restore: see
// the mode double. Not promised: anything about the keys of mode cache, which are not bound to a database.
func (p *Policies) RotateCache(ctx context.Context, reason string) (generation int64, err error) {
	if err := checkReason(reason); err != nil {
		return 0, err
	}
	return p.queries.CacheRotate(ctx, optional(reason))
}
