package inbox

import (
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox/internal/db"
)

// The statuses of a row.
const (
	statusPending   = "pending"
	statusCompleted = "completed"
	statusFailed    = "failed"
	statusDead      = "dead"
)

// claimsMax bounds how often a claim is tried again because the row changed between two statements.
const claimsMax = 3

// claim is the right to run the handler in the transaction that got it.
type claim struct {
	attempt int
	seen    int64 // the row's epoch before the claim; 0 if there was no row
}

// step is what comes after a look at the row.
type step uint8

const (
	stepAnswer   step = iota // the verdict is the answer
	stepClaim                // the row has gone: claim again
	stepTakeover             // the row is runnable
	stepBury                 // the row has used up its attempts
)

// decide says what a row means to a delivery with the given fingerprint. Completed and dead decide always; anything else
// only under the message's lock, without which another transaction may be changing the row. Work that has stored steps,
// or an expired lease that has used up its attempts, is left to lease mode, which knows how to go on.
func (s *settings) decide(row db.InboxLookRow, fingerprint []byte) (verdict, step) {
	v := verdict{attempt: int(row.Attempts), payloadKept: row.PayloadKept}
	due := seconds(row.DueIn)
	switch {
	case mismatch(row.Fingerprint, fingerprint):
		v.outcome = Mismatch
	case row.Status == statusCompleted:
		v.outcome, v.result = Replayed, row.Result
		if row.MayFill && s.policy != nil && row.FinishedAt != nil {
			v.copy = &rowCopy{CacheEntry{Fingerprint: row.Fingerprint, FinishedAt: *row.FinishedAt, Result: row.Result}, seconds(row.Age)}
		}
	case row.Status == statusDead:
		v.outcome = Dead
	case !row.Mine:
		v.outcome = InProgress
	case row.Status == "":
		return v, stepClaim
	case row.Status == statusPending && due > 0:
		v.outcome, v.after = InProgress, due
	case row.HasSteps, row.Status == statusPending && int(row.Attempts) >= s.MaxAttempts:
		v.outcome, v.err = InProgress, errLeased
	case row.Status == statusPending:
		return v, stepTakeover
	case int(row.Attempts) >= s.MaxAttempts:
		return v, stepBury
	case due > 0 && !s.IgnoreDue:
		v.outcome, v.after = NotDue, due
	default:
		return v, stepTakeover
	}
	return v, stepAnswer
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func optional(text string) pgtype.Text { return pgtype.Text{String: text, Valid: text != ""} }
