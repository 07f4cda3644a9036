package inbox

// Outcome is what became of a delivery. A consumer need not read it: [Disposition] says what to do. Not promised: that any
// but Executed and Replayed still holds when it is read, for another copy may complete the message meanwhile; and that
// nothing happened outside the database where the handler did not succeed.
type Outcome uint8

const (
	Executed    Outcome = iota // the handler ran; with Process it is committed, with Handle it is if the caller commits
	Replayed                   // completed before; the stored result is returned
	InProgress                 // another worker holds it
	Failed                     // the handler failed and attempts are left
	NotDue                     // it failed before and its next attempt is later; nothing ran
	Mismatch                   // the id was used before with another payload; nothing ran
	Dead                       // given up; an operator can requeue it
	Unavailable                // the store could not be used; no failure is recorded
	Unknown                    // the answer to COMMIT is lost and could not be found out in time; the effect may be there

	outcomes = iota
)

var outcomeNames = [outcomes]string{"executed", "replayed", "in_progress", "failed", "not_due", "mismatch", "dead", "unavailable", "unknown"}

// String returns the outcome as it stands in metrics.
func (o Outcome) String() string {
	if int(o) < len(outcomeNames) {
		return outcomeNames[o]
	}
	return "invalid"
}

// DecidedBy says which store gave the answer.
type DecidedBy uint8

const (
	ByTable DecidedBy = iota // the row
	ByCache                  // a cached copy of a completed row
	ByOff                    // nobody: the guard is switched off
)

var deciderNames = [...]string{"table", "cache", "off"}

// String returns the decider as it stands in metrics.
func (d DecidedBy) String() string {
	if int(d) < len(deciderNames) {
		return deciderNames[d]
	}
	return "invalid"
}

// Result is the answer for a delivery. With an error, Value is not to be used.
type Result[R any] struct {
	Value     R       // the handler's value after a round through its stored form, so that a replay has the same shape
	Outcome   Outcome // Executed or Replayed if the error is nil
	Replayed  bool    // Outcome is Replayed
	Attempt   int     // recorded attempts including this one; 0 if unknown
	DecidedBy DecidedBy
}
