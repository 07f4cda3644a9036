package inbox

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
)

const resumePage = 100

// Resume brings back the messages of a consumer that no broker delivers any more, from the payload in their rows: work
// whose lease has expired, and messages that failed or were requeued and are due. run is what handles a delivery of that
// consumer, usually a closure around [Process] or [ProcessLeased]; it claims the message, so any number of replicas may
// resume at once. Rows without a payload are not touched: their broker still has them.
//
// It looks at each row once, the oldest first, and returns how many runs ended without an error. An error of run does
// not stop it, because the row says what happens next; the errors are returned together, at most 10 of them. A row that
// cannot be read becomes dead. Resume is one step for a scheduler: call it again and again.
//
// Not promised: an order of the messages beyond that, a bound on its duration (give ctx a deadline), and that a row it
// saw is still runnable; then run's answer is ErrInProgress or the like, which is among the errors.
func Resume(ctx context.Context, box *Box, consumer string, run func(ctx context.Context, msg Message) error) (done int, err error) {
	err = errors.Join(box.check(), check.Text("consumer", consumer, consumerLenMax))
	if run == nil {
		err = errors.Join(err, &commitbox.InputError{Field: "run", Problem: "is nil"})
	}
	if err != nil {
		return 0, err
	}
	r := resuming{box: box, queries: db.New(box.schema.On(box.pool)), consumer: consumer, run: run}
	err = errors.Join(r.all(ctx), errors.Join(r.errs...))
	return r.done, err
}

type resuming struct {
	box      *Box
	queries  *db.Queries
	consumer string
	run      func(context.Context, Message) error
	done     int
	errs     []error
}

const resumeErrorsMax = 10

func (r *resuming) all(ctx context.Context) error {
	var afterAt time.Time
	var afterID string
	for {
		page, err := r.queries.InboxRunnable(ctx, db.InboxRunnableParams{Consumer: r.consumer, AfterAt: afterAt, AfterID: afterID, Page: resumePage})
		if err != nil {
			return err
		}
		for _, row := range page {
			afterAt, afterID = row.ReceivedAt, row.MessageID
			if err := r.one(ctx, row.MessageID); err != nil {
				return err
			}
		}
		if len(page) < resumePage {
			return nil
		}
	}
}

// one runs one message. Its error stops the whole.
func (r *resuming) one(ctx context.Context, message string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	row, err := r.queries.InboxStored(ctx, db.InboxStoredParams{Consumer: r.consumer, MessageID: message})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil
	}
	if err != nil {
		return err
	}
	msg := Message{ID: ID{r.consumer, message}, Payload: row.Payload, Fingerprint: row.Fingerprint, TraceID: row.TraceID}
	if msg.Headers, err = readHeaders(row.Headers); err != nil {
		r.note(r.box.afterFailure(ctx, &msg, anyEpoch, Permanent(err)).asError(msg.ID)) // nobody could ever run it
		return nil
	}
	r.note(r.guarded(ctx, msg))
	return nil
}

func (r *resuming) note(err error) {
	if err == nil {
		r.done++
	} else if len(r.errs) < resumeErrorsMax {
		r.errs = append(r.errs, err)
	}
}

// guarded keeps a panic of the user's function from ending the whole.
func (r *resuming) guarded(ctx context.Context, msg Message) error {
	_, err := recovered(func() ([]byte, error) { return nil, r.run(ctx, msg) })
	return err
}
