package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
)

// The rows that the state machines start from: attempts 2, epoch 4, three attempts allowed, unless a case says
// otherwise.
const (
	noRow     = ``
	stepped   = `insert into commitbox.inbox_step values ('c', $1, 's', 4)`
	completed = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, fingerprint, finished_at, result)
		values ('c', $1, 'completed', 2, 4, '\x0101', now(), '\x0137')`
	dead    = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, finished_at) values ('c', $1, 'dead', 2, 4, now())`
	dueRow  = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, fingerprint, next_attempt_at) values ('c', $1, 'failed', 2, 4, '\x0101', now() - interval '1 s')`
	later   = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, next_attempt_at) values ('c', $1, 'failed', 2, 4, now() + interval '1 h')`
	usedUp  = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, next_attempt_at) values ('c', $1, 'failed', 3, 4, now() - interval '1 s')`
	leased  = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until) values ('c', $1, 'pending', 2, 4, gen_random_uuid(), now() + interval '1 h')`
	expired = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until) values ('c', $1, 'pending', 2, 4, gen_random_uuid(), now() - interval '1 s')`
	crashed = `insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until) values ('c', $1, 'pending', 3, 4, gen_random_uuid(), now() - interval '1 s')`

	holdMessage = `select pg_advisory_xact_lock(commitbox.inbox_lock('c', $1))`
	holdRow     = `select 1 from commitbox.inbox where message_id = $1 for no key update`
)

// stateCase is one line of a state machine: a row, what another session holds, what happens, and what is left.
type stateCase struct {
	line   string
	from   []string // statements that make the row, committed
	holder string   // a statement of another transaction, which stays open
	do     func(ctx context.Context, s *scene) error
	want   string // the answer, and "status attempts epoch" of the row
}

// scene is what a case acts with.
type scene struct {
	*world
	box *inbox.Box
	id  inbox.ID
}

func (s *scene) message() inbox.Message {
	return inbox.Message{ID: s.id, Payload: []byte("p"), Fingerprint: []byte{1, 1}}
}

func (s *scene) process(ctx context.Context, msg inbox.Message, end error) error {
	res, err := inbox.Process(ctx, s.box, msg, func(ctx context.Context, tx pgx.Tx) (int, error) {
		return 7, errors.Join(write(ctx, tx, s.id, ""), end)
	})
	if err == nil && (res.Value != 7 || res.Replayed != (s.effects() == 0)) {
		return fmt.Errorf("%+v with %d effects", res, s.effects())
	}
	return err
}

func (s *scene) effects() int {
	return one[int](s.world, `select count(*)::int from effect where id = $1`, s.id.String())
}

func (s *scene) state() string {
	return one[string](s.world, `select coalesce((select concat_ws(' ', status, attempts, epoch) from commitbox.inbox where message_id = $1), 'none')`, s.id.Message)
}

var errState = errors.New("the handler fails")

// What cases do.
func runs(ctx context.Context, s *scene) error  { return s.process(ctx, s.message(), nil) }
func fails(ctx context.Context, s *scene) error { return s.process(ctx, s.message(), errState) }
func other(ctx context.Context, s *scene) error {
	return s.process(ctx, inbox.Message{ID: s.id, Fingerprint: []byte{1, 2}}, nil)
}

func acquires(ctx context.Context, s *scene) error {
	lease, err := s.box.Acquire(ctx, s.message())
	if err == nil {
		s.t.Cleanup(func() { _ = lease.Release(context.Background()) })
	}
	return err
}

// handled runs a failing Handle, and commits or not.
func handled(commit bool) func(context.Context, *scene) error {
	return func(ctx context.Context, s *scene) error {
		tx := s.begin()
		_, err := inbox.Handle(ctx, tx, s.id, func(ctx context.Context) (int, error) { return 0, errors.Join(write(ctx, tx, s.id, ""), errState) }, inbox.Using(s.box))
		if commit {
			return errors.Join(err, tx.Commit(ctx))
		}
		return errors.Join(err, tx.Rollback(ctx))
	}
}

// records rolls a failing Handle back, lets something happen to the row, and records the failure then.
func records(meanwhile string) func(context.Context, *scene) error {
	return func(ctx context.Context, s *scene) error {
		seen := handled(false)(ctx, s)
		if meanwhile != "" {
			s.exec(meanwhile, s.id.Message)
		}
		return inbox.RecordFailure(ctx, s.box, s.message(), seen)
	}
}

// under takes a lease and does something with it.
func under(do func(ctx context.Context, s *scene, lease *inbox.Lease) error) func(context.Context, *scene) error {
	return func(ctx context.Context, s *scene) error {
		lease, err := s.box.Acquire(ctx, s.message())
		if err != nil {
			return err
		}
		s.t.Cleanup(func() { _ = lease.Release(context.Background()) })
		return do(ctx, s, lease)
	}
}

func completes(ctx context.Context, _ *scene, lease *inbox.Lease) error {
	_, err := inbox.Complete(ctx, lease, 7)
	return err
}

func completesIn(end error) func(context.Context, *scene, *inbox.Lease) error {
	return func(ctx context.Context, s *scene, lease *inbox.Lease) error {
		_, err := inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (int, error) {
			return 7, errors.Join(write(ctx, tx, s.id, ""), end)
		})
		return err
	}
}

func steps(ctx context.Context, _ *scene, lease *inbox.Lease) error {
	_, err := inbox.Step(ctx, lease, "s", func(context.Context) (int, error) { return 7, nil })
	return err
}

func leaseFails(ctx context.Context, _ *scene, lease *inbox.Lease) error {
	return lease.Fail(ctx, errState)
}

// after does two things, the second whatever the first one answers.
func after(first, then func(context.Context, *scene, *inbox.Lease) error) func(context.Context, *scene, *inbox.Lease) error {
	return func(ctx context.Context, s *scene, lease *inbox.Lease) error {
		_ = first(ctx, s, lease)
		return then(ctx, s, lease)
	}
}

func expires(_ context.Context, s *scene, _ *inbox.Lease) error {
	s.expire(s.id)
	return nil
}

func takenOver(ctx context.Context, s *scene, _ *inbox.Lease) error {
	s.expire(s.id)
	return acquires(ctx, s)
}

var transactionMode = []stateCase{
	{"no row: executed", nil, "", runs, "ok; completed 1 0"},
	{"no row, the handler fails in Process: failed", nil, "", fails, "failed; failed 1 0"},
	{"no row, the handler fails for good: dead", nil, "", func(ctx context.Context, s *scene) error {
		return s.process(ctx, s.message(), inbox.Permanent(errState))
	}, "dead; dead 1 0"},
	{"no row, the handler fails in Handle, commit: failed", nil, "", handled(true), "failed; failed 1 1"},
	{"no row, the handler fails in Handle, rollback: no row", nil, "", handled(false), "failed; none"},
	{"failed, the limit was lowered: dead, not run", []string{usedUp}, "", runs, "dead; dead 3 4"},
	{"no row, held: in progress", nil, holdMessage, runs, "in_progress; none"},
	{"completed: replayed", []string{completed}, "", runs, "ok; completed 2 4"},
	{"completed, held: replayed", []string{completed}, holdMessage, runs, "ok; completed 2 4"},
	{"completed, other fingerprint: mismatch", []string{completed}, "", other, "mismatch; completed 2 4"},
	{"dead: dead", []string{dead}, "", runs, "dead; dead 2 4"},
	{"dead, held: dead", []string{dead}, holdMessage, runs, "dead; dead 2 4"},
	{"failed, held: in progress", []string{dueRow}, holdMessage, runs, "in_progress; failed 2 4"},
	{"failed, not due: not due", []string{later}, "", runs, "not_due; failed 2 4"},
	{"failed, due: executed", []string{dueRow}, "", runs, "ok; completed 3 5"},
	{"failed, due, the last attempt fails: dead", []string{dueRow}, "", fails, "dead; dead 3 4"},
	{"failed, due, the attempt before the last fails: failed", []string{dueRow, `update commitbox.inbox set attempts = 1 where message_id = $1`}, "", fails, "failed; failed 2 4"},
	{"failed, other fingerprint: mismatch", []string{dueRow}, "", other, "mismatch; failed 2 4"},
	{"pending, lease live: in progress", []string{leased}, "", runs, "in_progress; pending 2 4"},
	{"pending, expired: executed", []string{expired}, "", runs, "ok; completed 3 5"},
	{"pending, expired, the handler fails: dead at the limit", []string{expired}, "", fails, "dead; dead 3 5"},
	{"pending, expired, steps: in progress", []string{expired, stepped}, "", runs, "in_progress; pending 2 4"},
	{"pending, expired, attempts used up: in progress", []string{crashed}, "", runs, "in_progress; pending 3 4"},
	{"pending, expired, the row is locked: in progress", []string{expired}, holdRow, runs, "in_progress; pending 2 4"},
	{"the row vanishes, its removal is open: in progress", []string{dueRow}, `with x as (delete from commitbox.inbox where message_id = $1) ` + holdMessage, runs, "in_progress; failed 2 4"},
}

var failureRecord = []stateCase{
	{"no row: failed", nil, "", records(""), "failed; failed 1 0"},
	{"no row, for good: dead", nil, "", func(ctx context.Context, s *scene) error {
		return inbox.RecordFailure(ctx, s.box, s.message(), inbox.Permanent(errState))
	}, "dead; dead 1 0"},
	{"failed with the epoch: counted, dead at the limit", []string{dueRow}, "", records(""), "dead; dead 3 4"},
	{"failed with the epoch: counted", []string{dueRow, `update commitbox.inbox set attempts = 1 where message_id = $1`}, "", records(""), "failed; failed 2 4"},
	{"requeued meanwhile: unchanged", []string{dueRow}, "", records(`select commitbox.inbox_requeue('c', $1)`), "unavailable; failed 0 5"},
	{"completed meanwhile: unchanged, replayed", []string{dueRow}, "", records(`select commitbox.inbox_mark_completed('c', $1)`), "ok; completed 2 5"},
	{"dead meanwhile: unchanged", []string{dueRow}, "", records(`select commitbox.inbox_discard('c', $1)`), "dead; dead 2 5"},
	{"leased meanwhile: unchanged", []string{dueRow}, "", func(ctx context.Context, s *scene) error {
		seen := handled(false)(ctx, s)
		return errors.Join(acquires(ctx, s), inbox.RecordFailure(ctx, s.box, s.message(), seen))
	}, "in_progress; pending 3 5"},
	{"pending, expired, with the epoch: counted, the holder fenced", []string{expired}, "", records(""), "dead; dead 3 5"},
	{"held until the bound: unchanged, in progress", []string{dueRow}, holdMessage, func(ctx context.Context, s *scene) error {
		return inbox.RecordFailure(ctx, s.box, s.message(), errState)
	}, "in_progress; failed 2 4"},
}

var leaseMode = []stateCase{
	{"no row, acquire: lease", nil, "", acquires, "ok; pending 1 1"},
	{"a transaction runs it, acquire: in progress", nil, holdMessage, acquires, "in_progress; none"},
	{"pending, acquire with another token: in progress", []string{leased}, "", acquires, "in_progress; pending 2 4"},
	{"pending, expired, acquire: lease", []string{expired}, "", acquires, "ok; pending 3 5"},
	{"pending, expired, steps, acquire: lease, steps kept", []string{expired, stepped}, "", under(func(ctx context.Context, s *scene, lease *inbox.Lease) error {
		_, err := inbox.Step(ctx, lease, "s", func(context.Context) (inbox.Void, error) { return inbox.Void{}, errors.New("ran again") })
		return err
	}), "ok; pending 3 5"},
	{"pending, expired, row locked, acquire: in progress", []string{expired}, holdRow, acquires, "in_progress; pending 2 4"},
	{"pending, expired, attempts used up, acquire: dead", []string{crashed}, "", acquires, "dead; dead 3 5"},
	{"failed, due, acquire: lease", []string{dueRow}, "", acquires, "ok; pending 3 5"},
	{"failed, due, attempts used up, acquire: dead", []string{usedUp}, "", acquires, "dead; dead 3 5"},
	{"failed, not due, acquire: retry after", []string{later}, "", acquires, "not_due; failed 2 4"},
	{"completed, acquire: replayed", []string{completed}, "", acquires, "replayed; completed 2 4"},
	{"dead, acquire: dead", []string{dead}, "", acquires, "dead; dead 2 4"},
	{"pending, step: stored", nil, "", under(steps), "ok; pending 1 1"},
	{"pending, step again: already there", nil, "", under(after(steps, steps)), "ok; pending 1 1"},
	{"another epoch, step: lost", nil, "", under(after(takenOver, steps)), "lost; pending 2 2"},
	{"pending, complete: completed", nil, "", under(completes), "ok; completed 1 1"},
	{"pending, complete in a transaction: completed", nil, "", under(completesIn(nil)), "ok; completed 1 1"},
	{"completed with my epoch, complete again: completed", nil, "", under(after(completes, completes)), "ok; completed 1 1"},
	{"completed in a transaction, complete again: completed", nil, "", under(after(completesIn(nil), completesIn(nil))), "ok; completed 1 1"},
	{"another epoch, complete: lost", nil, "", under(after(takenOver, completes)), "lost; pending 2 2"},
	{"another epoch, complete in a transaction: lost", nil, "", under(after(takenOver, completesIn(nil))), "lost; pending 2 2"},
	{"the completing transaction rolls back: still leased", nil, "", under(after(completesIn(errState), steps)), "ok; pending 1 1"},
	{"pending, fail: failed", nil, "", under(leaseFails), "failed; failed 1 1"},
	{"pending, the last attempt fails: dead", []string{dueRow}, "", under(leaseFails), "dead; dead 3 5"},
	{"another epoch, fail: lost", nil, "", under(after(takenOver, leaseFails)), "lost; pending 2 2"},
	{"not pending, fail: lost", nil, "", under(after(completes, leaseFails)), "lost; completed 1 1"},
	{"pending, expired, nobody took over, complete: completed", nil, "", under(after(expires, completes)), "ok; completed 1 1"},
	{"pending, expired, nobody took over, complete in a transaction: completed", nil, "", under(after(expires, completesIn(nil))), "ok; completed 1 1"},
	{"pending, release: due, not counted", nil, "", under(func(ctx context.Context, _ *scene, lease *inbox.Lease) error { return lease.Release(ctx) }), "ok; failed 0 1"},

	{"operator, failed, requeue: due, attempts anew", []string{usedUp}, "", requeues, "ok; failed 0 5"},
	{"operator, dead, requeue: due, attempts anew", []string{dead}, "", requeues, "ok; failed 0 5"},
	{"operator, completed, requeue: refused", []string{completed}, "", requeues, "not found; completed 2 4"},
	{"operator, leased, requeue: refused", []string{leased}, "", requeues, "not found; pending 2 4"},
	{"operator, it runs, requeue: in progress", []string{dueRow}, holdMessage, requeues, "in_progress; failed 2 4"},
	{"operator, failed, discard: dead", []string{later}, "", discards, "ok; dead 2 5"},
	{"operator, expired, discard: dead", []string{expired}, "", discards, "ok; dead 2 5"},
	{"operator, leased, discard: refused", []string{leased}, "", discards, "not found; pending 2 4"},
}

func requeues(ctx context.Context, s *scene) error {
	_, err := s.box.Requeue(ctx, s.id, "")
	return err
}

func discards(ctx context.Context, s *scene) error { return s.box.Discard(ctx, s.id, "") }

// The lines of the state machines that need a broken connection, a conflict or an open statement have tests of their own.
var elsewhere = map[string]func(*testing.T){
	"transaction mode: no row after a lost conflict, claimed again":        TestF14_ClaimRacesWithRemoval,
	"transaction mode: no row after a lost conflict, an older snapshot":    TestF14_RemovedAfterTheSnapshot,
	"transaction mode: COMMIT answer lost, completed or no row":            TestF21_LostCommitAnswer,
	"transaction mode: COMMIT answer lost, still open: outcome unknown":    TestF21_StillOpenIsUnknown,
	"transaction mode: 40001 and 40P01: run again, then unavailable":       TestSerializationFailuresAreRunAgain,
	"transaction mode: 40001 at COMMIT":                                    TestConflictAtCommitIsRunAgain,
	"transaction mode: pending, its completing transaction is open":        TestF11_CompletingTransactionMakesNobodyWait,
	"lease mode: pending, acquire with the same token: the same lease":     TestF22_SameTokenSameLease,
	"lease mode: pending, renew: moved":                                    TestLeaseIsRenewed,
	"lease mode: pending, renew, row locked: busy, held":                   TestF12_RenewalBesideACompletingTransaction,
	"lease mode: another epoch, renew: lost":                               TestLeaseTellsItsHolderOfTheLoss,
	"lease mode: pending, row locked by a step: takeover waits for nobody": TestF23_TakeoverSkipsAnOpenStep,
	"lease mode: complete with a lost answer":                              TestF22_CompleteWithALostAnswer,
	"retention: completed and dead rows only":                              TestF19_OnlyEndedRowsAge,
}

// Every line of the state machines: from each state, what each event answers and leaves.
func TestStates(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{MaxAttempts: 3})
	for name, cases := range map[string][]stateCase{"transaction mode": transactionMode, "failure record": failureRecord, "lease mode": leaseMode} {
		for i, c := range cases {
			t.Run(name+"/"+c.line, func(t *testing.T) {
				s := &scene{&world{w.DB, t}, box, inbox.ID{Consumer: "c", Message: fmt.Sprint(name, i)}}
				for _, statement := range c.from {
					s.exec(statement, s.id.Message)
				}
				if c.holder != "" {
					if _, err := s.begin().Exec(t.Context(), c.holder, s.id.Message); err != nil {
						t.Fatal(err)
					}
				}
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				answer := "not found"
				if err := c.do(ctx, s); !errors.Is(err, inbox.ErrNotFound) {
					answer = outcome(err)
				}
				if got := answer + "; " + s.state(); got != c.want {
					t.Errorf("%q, want %q", got, c.want)
				}
			})
		}
	}
	for line, test := range elsewhere {
		if test == nil {
			t.Errorf("no test of %s", line)
		}
	}
}

// An old snapshot shows neither the row that the claim ran into nor that it is gone: another transaction is needed.
func TestF14_RemovedAfterTheSnapshot(t *testing.T) {
	w := newWorld(t)
	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		tx := w.begin(pgx.TxOptions{IsoLevel: level})
		if _, err := tx.Exec(t.Context(), `select count(*) from commitbox.inbox`); err != nil {
			t.Fatal(err)
		}
		id := inbox.ID{Consumer: "c", Message: string(level)}
		w.exec(completed, id.Message)
		_, err := inbox.Handle(t.Context(), tx, id, func(ctx context.Context) (inbox.Void, error) { return inbox.Void{}, write(ctx, tx, id, "") })
		if !inbox.Retryable(err) {
			t.Errorf("%s: %v", level, err)
		}
		w.wantEffects(id, 0)
	}
}
