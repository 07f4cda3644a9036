package inbox

import (
	"context"
	"errors"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// ErrNotFound says that there is no row of the id in a state that allows what was asked.
var ErrNotFound = errors.New("no such message in a state that allows this")

const reasonLenMax = 900

// IsCompleted says whether a message is completed, and returns its stored result. It reads only. A result that does not
// fit R is ErrNoResult; ask with Void where it does not matter. Not promised: that a false answer is still true when it
// arrives, so it is no guard for work; and that a true one lasts longer than retention keeps the row.
func IsCompleted[R any](ctx context.Context, box *Box, id ID) (value R, completed bool, err error) {
	if err := errors.Join(box.check(), id.check()); err != nil {
		return value, false, err
	}
	row, err := db.New(box.schema.On(box.pool)).InboxGet(ctx, db.InboxGetParams{Consumer: id.Consumer, MessageID: id.Message})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return value, false, nil
	case err != nil:
		return value, false, unavailable(err).asError(id)
	case row.Status != statusCompleted:
		return value, false, nil
	}
	value, err = decode[R](row.Result)
	return value, true, err
}

// MarkCompleted marks a message as completed with a result, without a handler, in the caller's transaction: for work
// that was done by hand or by another system. A message that is completed already stays as it is. One that a worker
// holds is refused with ErrInProgress. The reason is written to the audit table; it may be empty. Not promised: that the
// work was done, which is the caller's word; that it counts if tx is rolled back; and that a holder whose lease has expired
// stops at once: it is fenced when it asks the database.
func MarkCompleted[R any](ctx context.Context, tx pgx.Tx, id ID, result R, reason string, opts ...Option) error {
	h := handling{settings: standard, msg: Message{ID: id}, tx: tx}
	for _, option := range opts {
		option(&h)
	}
	if err := errors.Join(h.check(ctx, false), checkReason(reason)); err != nil {
		return err
	}
	stored, err := encode(result, h.ResultMax)
	if err != nil {
		return err
	}
	state, err := db.New(h.schema.On(tx)).InboxMarkCompleted(ctx, db.InboxMarkCompletedParams{
		Consumer: id.Consumer, MessageID: id.Message, Result: stored, Reason: optional(reason),
	})
	if err != nil {
		return unavailable(check.Ended(err)).asError(id)
	}
	if state == "held" {
		return verdict{outcome: InProgress}.asError(id)
	}
	return nil
}

func checkReason(reason string) error { return check.OptionalText("reason", reason, reasonLenMax) }

// Requeue makes a failed or dead message runnable at once, with all its attempts, and says whether its row holds the
// payload, so that [Resume] brings it back; if not, it has to be delivered again from where the broker put it. The
// reason is written to the audit table. ErrNotFound: there is no failed or dead row. ErrInProgress: it is being run.
//
// Not promised: that anybody delivers it. Nothing of this package runs it by itself. A completed message cannot be
// requeued: whoever wants its effect again sends a new message.
func (b *Box) Requeue(ctx context.Context, id ID, reason string) (payloadKept bool, err error) {
	var next string
	err = b.operate(ctx, id, reason, func(q *db.Queries) (err error) {
		next, err = q.InboxRequeue(ctx, db.InboxRequeueParams{Consumer: id.Consumer, MessageID: id.Message, Reason: optional(reason)})
		return err
	})
	if err == nil && next == "" {
		err = ErrNotFound
	}
	return next == "runnable", err
}

// Discard gives up a message that is failed, dead or under an expired lease. It leaves a dead row, so that a later
// delivery does not run it. The reason is written to the row and to the audit table. The errors are those of Requeue. Not
// promised: that it stays away longer than retention keeps the row, or that what its attempts did outside the database is
// undone.
func (b *Box) Discard(ctx context.Context, id ID, reason string) error {
	var found bool
	err := b.operate(ctx, id, reason, func(q *db.Queries) (err error) {
		found, err = q.InboxDiscard(ctx, db.InboxDiscardParams{Consumer: id.Consumer, MessageID: id.Message, Reason: optional(reason)})
		return err
	})
	if err == nil && !found {
		err = ErrNotFound
	}
	return err
}

// operate runs one statement in a transaction that waits for a lock at most lockWait.
func (b *Box) operate(ctx context.Context, id ID, reason string, run func(*db.Queries) error) error {
	if err := errors.Join(b.check(), id.check(), checkReason(reason)); err != nil {
		return err
	}
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return unavailable(err).asError(id)
	}
	defer conn.Release()
	defer rollback(ctx, conn.Conn())
	var tx pgx.Tx
	err = run(db.New(b.schema.On(pipe{on: conn.Conn(), begin: &tx, after: schema.Commit, before: []statement{
		{b.schema.Rewrite(db.LockTimeout), []any{strconv.FormatInt(lockWait.Milliseconds(), 10)}},
	}})))
	switch {
	case sqlState(err) == stateLockTimeout:
		return verdict{outcome: InProgress}.asError(id)
	case err != nil:
		return unavailable(err).asError(id)
	}
	return nil
}

// Status is the state of a row. Not promised: that a message without a row is new. An attempt in a transaction leaves one
// when it ends, none if its process dies, and retention removes rows.
type Status string

const (
	StatusPending   Status = statusPending   // leased; the lease may have ended
	StatusCompleted Status = statusCompleted // done
	StatusFailed    Status = statusFailed    // to be run again
	StatusDead      Status = statusDead      // given up
)

// Entry is a row as an operator sees it.
type Entry struct {
	ID          ID
	Status      Status
	Attempts    int
	ReceivedAt  time.Time
	FinishedAt  time.Time // zero unless completed or dead
	DueAt       time.Time // when a failed row runs again, or a lease ends; else zero
	LastError   string
	TraceID     string            // only from Get
	PayloadKept bool              // the row holds the payload
	Payload     []byte            // only from Get
	Headers     map[string]string // only from Get
}

// Get returns one row with its payload, if it holds one. ErrNotFound: there is none. The SQL function inbox_get says the
// same. Not promised: that a message without a row was never delivered, because retention removes rows and an attempt in a
// transaction leaves one only when it ends.
func (b *Box) Get(ctx context.Context, id ID) (Entry, error) {
	if err := errors.Join(b.check(), id.check()); err != nil {
		return Entry{}, err
	}
	row, err := db.New(b.schema.On(b.pool)).InboxGet(ctx, db.InboxGetParams{Consumer: id.Consumer, MessageID: id.Message})
	if errors.Is(err, pgx.ErrNoRows) {
		return Entry{}, ErrNotFound
	}
	if err != nil {
		return Entry{}, unavailable(err).asError(id)
	}
	e := Entry{
		ID: id, Status: Status(row.Status), Attempts: int(row.Attempts), ReceivedAt: row.ReceivedAt, FinishedAt: row.FinishedAt, DueAt: row.DueAt,
		LastError: row.LastError, TraceID: row.TraceID, PayloadKept: row.Payload != nil, Payload: row.Payload,
	}
	e.Headers, err = readHeaders(row.Headers)
	return e, err
}

// Stats is what of a consumer is not done. Completed rows are not counted here, because that would read them all.
type Stats struct {
	Pending, Failed, Dead int64
	Expired               int64         // of the pending ones: the lease has run out and nobody has taken over
	OldestAge             time.Duration // of the pending and failed ones
}

// Stats counts the rows of a consumer that are not completed, as the SQL function inbox_stats does. It reads each of them.
// Not promised: messages that run in a transaction right now, which nobody else can see, and those that no consumer has
// received.
func (b *Box) Stats(ctx context.Context, consumer string) (Stats, error) {
	if err := errors.Join(b.check(), check.Text("consumer", consumer, consumerLenMax)); err != nil {
		return Stats{}, err
	}
	row, err := db.New(b.schema.On(b.pool)).InboxStats(ctx, consumer)
	return Stats{Pending: row.Pending, Failed: row.Failed, Dead: row.Dead, Expired: row.Expired, OldestAge: seconds(row.OldestSeconds)}, err
}

// Consumers returns the names of all consumers that have a row, sorted byte by byte. Not promised: those whose rows
// retention has removed.
func (b *Box) Consumers(ctx context.Context) ([]string, error) {
	return db.New(b.schema.On(b.pool)).InboxConsumers(ctx)
}
