package inbox

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
)

// uncovered handles a message that nothing guards, and counts it.
func (b *Box) uncovered(ctx context.Context, m *Message, run handler, why string) verdict {
	if why != "" {
		b.Observer.Observe(commitbox.InboxUnguarded, 1, m.ID.Consumer, why)
	}
	v := b.processBare(ctx, m, run, false)
	v.by = ByOff
	return v
}

// processBare is process without a claim. With readRow, what the table knows of the message is an answer, and a message
// that has a row is handled by it.
func (b *Box) processBare(ctx context.Context, m *Message, run handler, readRow bool) verdict {
	if m.Delivery > b.MaxDeliveries {
		return verdict{outcome: Dead, err: errDeliveries}
	}
	for conflicts := 0; ; conflicts++ {
		v, hasRow := b.attemptBare(ctx, m, run, readRow)
		switch {
		case hasRow:
			return b.withRow(ctx, m, run)
		case v.lost: // there is no row to find it out from
			return verdict{outcome: Unknown, err: v.err}
		case v.outcome != Unavailable || !conflict(v.err) || conflicts == conflictsMax:
			return v
		}
		b.Observer.Observe(commitbox.InboxRetries, 1, m.ID.Consumer)
		if !sleep(ctx, jitter(pollFirst<<conflicts)) {
			return v
		}
	}
}

// attemptBare runs one transaction without a row of its own.
func (b *Box) attemptBare(ctx context.Context, m *Message, run handler, readRow bool) (v verdict, hasRow bool) {
	conn, err := b.pool.Acquire(ctx)
	if err != nil {
		return unavailable(err), false
	}
	defer conn.Release()
	var tx pgx.Tx
	if !readRow {
		tx, err = conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	} else {
		// The look takes the message's lock, which keeps whoever still claims rows out until this transaction ends.
		row, err2 := b.look(ctx, pipe{on: conn.Conn(), begin: &tx}, m.ID)
		if err = err2; err == nil {
			if v, next := b.decide(row, m.Fingerprint); next != stepClaim {
				rollback(ctx, conn.Conn())
				return v, next != stepAnswer
			}
		}
	}
	if err != nil {
		rollback(ctx, conn.Conn())
		return unavailable(err), false
	}
	w := &work{box: b, msg: m, conn: conn, tx: tx, bare: true}
	return w.run(ctx, run), false
}

// unrecorded is the verdict of a failure for which there is no row. The broker counts.
func (b *Box) unrecorded(m *Message, cause error) verdict {
	if b.limitFor(cause) == 1 && b.MaxAttempts > 1 || m.Delivery >= b.MaxDeliveries || errors.Is(cause, errDeliveries) {
		return verdict{outcome: Dead, err: cause}
	}
	return verdict{outcome: Failed, after: b.BackoffBase, err: cause}
}
