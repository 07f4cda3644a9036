package optimistic

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5/pgconn"
)

// What an [*Error] stands for; match with errors.Is.
var (
	ErrConflict  = errors.New("the version has changed")
	ErrNotFound  = errors.New("there is no such row")
	ErrCondition = errors.New("the version is the expected one, but another condition of the statement does not hold")
)

// ErrUnsafe says that a statement given to [Exec] has changed something else than one row from the expected version to
// the next. It is an error of the program; its transaction was made unusable.
var ErrUnsafe = errors.New("the statement does not change one row from the expected version to the next")

// ErrOutcomeUnknown says that [Retry] sent COMMIT and lost the answer: the change may have been made. Read before you decide.
var ErrOutcomeUnknown = errors.New("the answer to COMMIT was lost, and the change may have been made")

// Error says why nothing was changed. It matches ErrConflict, ErrNotFound or ErrCondition.
type Error struct {
	Resource string // the key of the row, or type/id
	Expected int64
	Actual   int64 // what was found afterwards; a resource or row that is not there counts as 0
	// Pending says that another transaction is changing the resource, so that Actual is the version from before. If it is
	// rolled back, the expected version was the right one. Only [Advance] answers so.
	Pending bool

	reason error
}

func (e *Error) Error() string {
	switch {
	case errors.Is(e.reason, ErrNotFound):
		return fmt.Sprintf("optimistic: %s: version %d was expected: %v", e.Resource, e.Expected, e.reason)
	case e.Pending:
		return fmt.Sprintf("optimistic: %s: version %d was expected: another transaction is changing it", e.Resource, e.Expected)
	}
	return fmt.Sprintf("optimistic: %s: version %d was expected, %d was found: %v", e.Resource, e.Expected, e.Actual, e.reason)
}

func (e *Error) Unwrap() error { return e.reason }

// Retryable says whether reading again and applying again in a new transaction may succeed: the version has changed, or
// PostgreSQL reports a serialization failure (40001) or a deadlock (40P01). After the former the same transaction can go
// on too, if it is READ COMMITTED, because it sees what others have committed.
func Retryable(err error) bool {
	if errors.Is(err, ErrConflict) {
		return true
	}
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == stateSerialization || pg.Code == stateDeadlock)
}

// The SQLSTATEs that the package branches on.
const (
	stateSerialization = "40001"
	stateDeadlock      = "40P01"
)
