package inbox

import (
	"context"
	"errors"

	"github.com/commitbox/commitbox/internal/db"
)

var errDeliveries = errors.New("delivered more often than Config.MaxDeliveries allows, and the last run left no recorded end")

// overdelivered answers a message that the broker has delivered too often, or says that it is not decided: without a row
// it may never have run, because the store was away each time. It then runs once, and a row is left first, so that one
// that kills its process is given up by the next delivery.
func (b *Box) overdelivered(ctx context.Context, m *Message) (v verdict, decided bool) {
	row, err := b.look(ctx, pipe{on: b.pool}, m.ID)
	if err != nil {
		return unavailable(err), true
	}
	v, next := b.decide(row, m.Fingerprint)
	switch {
	case next == stepAnswer && v.outcome != NotDue:
		return v, true
	case next == stepClaim:
		return b.leaveTrace(ctx, m)
	case row.Attempts == 0 && row.DueIn > -lockWait.Seconds():
		return verdict{outcome: InProgress}, true // whoever left the row is about to run it
	}
	return b.afterFailure(ctx, m, row.Epoch, errDeliveries), true
}

func (b *Box) leaveTrace(ctx context.Context, m *Message) (v verdict, decided bool) {
	err := b.guarded(ctx, m.ID, func(p pipe) error {
		_, err := db.New(b.schema.On(p)).InboxLeaveTrace(ctx, db.InboxLeaveTraceParams{
			Consumer: m.ID.Consumer, MessageID: m.ID.Message, LastError: errDeliveries.Error(), Fingerprint: m.Fingerprint, TraceID: optional(m.TraceID),
		})
		return err
	})
	switch {
	case sqlState(err) == stateLockTimeout:
		return verdict{outcome: InProgress}, true
	case err != nil:
		return unavailable(err), true
	}
	return verdict{}, false
}
