package inbox

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox/internal/db"
)

// Lease is the right to work on a message outside a transaction, for work that leaves the database: a charge, a mail, a
// call that takes minutes. It is renewed in the background until it is ended by [Complete], [CompleteIn], Fail or
// Release; one of these must be called. Every write carries the lease's epoch and token, so that a holder whose lease was
// taken over can change nothing.
//
// It is safe for concurrent use. Its context (Bind) ends before the lease can have expired, unless it is renewed; the
// renewals have up to two connections of their own, beside the box's pool, from the first renewal until the box's last
// lease has ended. What is not promised: that no other holder works at the same time. A process that stops
// for longer than the lease and then goes on works beside its successor until it asks the database; pass the message's
// id on to services that can recognise a repeat, and use [Step].
type Lease struct {
	box     *Box
	msg     Message
	token   pgtype.UUID
	epoch   int64
	born    time.Time // the row's received_at
	attempt int

	ctx       context.Context // until the lease has ended or is lost
	stop      context.CancelCauseFunc
	completed atomic.Bool   // confirmed
	halted    chan struct{} // closed when the renewing goroutine has returned

	term  term
	steps named
}

// Acquire takes the lease of a message, and keeps its payload in the row if it has one, so that [Resume] can go on with
// it. The lease lives until it is ended, whatever becomes of ctx afterwards.
//
// The errors are those of [Process]: ErrInProgress while another worker holds it, ErrNotDue, ErrDead (attempts are
// counted here, by each lease), ErrPayloadMismatch, ErrUnavailable. A message that is completed is an [*Error] of the
// outcome Replayed, which [Disposition] acks; [IsCompleted] reads its result.
//
// Not promised: that a later Acquire finds what this one's holder has done outside the database, unless it is a [Step]; an
// end of the work, for a lease is renewed as long as its process lives; and a place in a queue, for of several who ask
// again any may be next.
func (b *Box) Acquire(ctx context.Context, msg Message) (*Lease, error) {
	if err := errors.Join(b.check(), msg.check()); err != nil {
		return nil, err
	}
	b, over := b.under(msg.ID.Consumer)
	defer over()
	lease, v := b.acquire(ctx, msg)
	if lease != nil {
		return lease, nil
	}
	if v.outcome == Replayed {
		return nil, &Error{ID: msg.ID, Outcome: Replayed, Attempt: v.attempt}
	}
	return nil, v.asError(msg.ID)
}

// acquire asks until there is a lease or an answer.
func (b *Box) acquire(ctx context.Context, msg Message) (*Lease, verdict) {
	asked, known := b.knownElsewhere(ctx, &msg)
	if known {
		return nil, asked
	}
	token := pgtype.UUID{Bytes: uuid.New(), Valid: true}
	for wait := newPoll(b.Wait); ; {
		lease, v := b.tryAcquire(ctx, msg, token)
		if lease != nil || v.outcome != InProgress || !wait.next(ctx) {
			if !asked.away {
				b.fill(ctx, msg.ID, v.copy)
			}
			return lease, v
		}
	}
}

func (b *Box) tryAcquire(ctx context.Context, msg Message, token pgtype.UUID) (*Lease, verdict) {
	for range claimsMax {
		asked := time.Now()
		row, err := b.sendAcquire(ctx, &msg, token)
		switch {
		case err == nil && row.Status == statusDead:
			return nil, verdict{outcome: Dead, attempt: int(row.Attempts), payloadKept: row.PayloadKept, seen: &row.Epoch}
		case err == nil:
			return b.newLease(msg, token, row, asked), verdict{}
		case !errors.Is(err, pgx.ErrNoRows):
			return nil, unavailable(err)
		}
		seen, err := b.look(ctx, pipe{on: b.pool}, msg.ID)
		if err != nil {
			return nil, unavailable(err)
		}
		seen.HasSteps = false // a lease goes on behind them
		switch v, next := b.decide(seen, msg.Fingerprint); {
		case next == stepBury:
			return nil, b.afterLimit(ctx, &msg, seen.Epoch)
		case next == stepAnswer && !errors.Is(v.err, errLeased):
			return nil, v
		}
	}
	return nil, verdict{outcome: InProgress}
}

// sendAcquire repeats a request whose answer was lost: with its token it gets the same lease.
func (b *Box) sendAcquire(ctx context.Context, m *Message, token pgtype.UUID) (row db.InboxAcquireRow, err error) {
	payload, headers := m.kept()
	err = b.persist(ctx, func() error {
		row, err = db.New(b.schema.On(b.pool)).InboxAcquire(ctx, db.InboxAcquireParams{
			Consumer: m.ID.Consumer, MessageID: m.ID.Message, Token: token, LeaseSeconds: b.LeaseFor.Seconds(),
			Fingerprint: m.Fingerprint, Payload: payload, Headers: optional(headers), TraceID: optional(m.TraceID),
			IgnoreDue: b.IgnoreDue, MaxAttempts: int32(b.MaxAttempts),
		})
		return err
	})
	return row, err
}

// persist runs an idempotent request again while the store does not answer, for a few seconds.
func (b *Box) persist(ctx context.Context, request func() error) error {
	for wait := newPoll(cleanupTimeout); ; {
		err := request()
		if err == nil || errors.Is(err, pgx.ErrNoRows) || sqlState(err) != "" && !transient(err) || !wait.next(ctx) {
			return err
		}
	}
}

func (b *Box) newLease(msg Message, token pgtype.UUID, row db.InboxAcquireRow, asked time.Time) *Lease {
	l := &Lease{box: b, msg: msg, token: token, epoch: row.Epoch, born: row.ReceivedAt, attempt: int(row.Attempts), halted: make(chan struct{})}
	l.ctx, l.stop = context.WithCancelCause(context.Background())
	l.term.extend(asked, b.LeaseFor)
	go l.renew()
	return l
}

// ID returns the message's id.
func (l *Lease) ID() ID { return l.msg.ID }

// Attempt returns how many leases the message has had, this one included, since it was last requeued. Not promised: that
// each of them ran; and those that were released are not counted.
func (l *Lease) Attempt() int { return l.attempt }

// Bind returns a context that ends with ctx and when the lease is lost, but not when its holder ends it. The cause of a
// loss is ErrLeaseLost. Work under the lease runs with it. Not promised: that a process that stood still hears of its loss
// before its successor begins.
func (l *Lease) Bind(ctx context.Context) (context.Context, context.CancelFunc) {
	bound, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(l.ctx, func() {
		if cause := context.Cause(l.ctx); errors.Is(cause, ErrLeaseLost) {
			cancel(cause)
		}
	})
	return bound, func() {
		stop()
		cancel(context.Canceled)
	}
}

func (l *Lease) queries(on db.DBTX) *db.Queries { return db.New(l.box.schema.On(on)) }

// held reads what became of the lease.
func (l *Lease) held(ctx context.Context, on db.DBTX) (db.InboxHeldRow, error) {
	return l.queries(on).InboxHeld(ctx, l.position())
}

func (l *Lease) position() db.InboxHeldParams {
	return db.InboxHeldParams{Consumer: l.msg.ID.Consumer, MessageID: l.msg.ID.Message, Epoch: l.epoch, Token: l.token, ReceivedAt: l.born}
}

// end stops the renewal: of a lease that its holder has ended, or, with ErrLeaseLost, of one that is lost.
func (l *Lease) end(cause error) {
	l.stop(cause)
	<-l.halted
}

var errLeaseEnded = errors.New("the lease was ended by its holder")

// done notes that the message is completed.
func (l *Lease) done() {
	l.completed.Store(true)
	l.end(errLeaseEnded)
}

// lost is the error of a holder whose lease was taken over.
func (l *Lease) lost() error {
	l.end(ErrLeaseLost)
	return &Error{ID: l.msg.ID, Outcome: InProgress, Attempt: l.attempt, Err: ErrLeaseLost}
}

func (l *Lease) unavailable(err error) error {
	return &Error{ID: l.msg.ID, Outcome: Unavailable, Attempt: l.attempt, Err: err}
}
