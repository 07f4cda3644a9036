// Package optimistic changes a row only if nobody has changed it since it was read.
//
// A version is a bigint that starts at 0 or 1 and that every change raises by one. [Exec] changes a row of your own table,
// which has a version column. [Advance] raises the version of something that has none, such as a document elsewhere or a
// group of rows. Both return the new version, or an [*Error] that says which version was found. [Retry] reads and applies
// again until it wins.
//
// A version that was read by somebody else, such as the If-Match header of a request, is not for [Retry]: its conflict is
// the answer. Together with package inbox, claim the command first and change the row in its handler: a repeated command
// then gets the answer of its first run, and not a conflict with it.
//
// What is not promised: anything about changes that do not name a version. They have to raise it, or nobody notices them.
package optimistic

import (
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/schema"
)

// Row is one row of a table of yours that has a version column.
type Row struct {
	// Look reads the version of the row, such as "select version from account where id = $1". It is sent when nothing was
	// changed, to tell a conflict from a row that is not there. A row that it leaves out, such as one that is marked as
	// deleted, is not found.
	Look string
	Key  []any // the arguments of Look, which are also the first ones of the statement
}

// Exec changes a row if it is at the expected version, and returns the new one. In the statement the row's key is $1, the
// expected version comes behind it ($2, for a key of one value), and args follow ($3 and so on):
//
//	update account set owner = $3, version = version + 1 where id = $1 and version = $2 returning version
//
// The statement has to compare the version, raise it by one and return the new one. It may have further conditions, and it
// may be a delete that returns version + 1. What the error says:
//
//   - ErrConflict: the row is at another version; Error.Actual is the one that was found
//   - ErrNotFound: there is no such row, or there is none any more
//   - ErrCondition: the row is at the expected version, and the statement's further conditions do not hold
//   - ErrUnsafe: the statement has changed more than one row, or one that was not at the expected version, or does not
//     return the version raised by one. tx was made unusable, so that the change cannot be committed
//   - an [*commitbox.InputError]: an argument was refused before anything was sent
//   - any other error is PostgreSQL's and has aborted tx. Under REPEATABLE READ and SERIALIZABLE a change that was
//     committed since tx began is a serialization failure; [Retryable] knows it
//
// After the first three and the InputError, tx is as it was and can go on. Exec takes one round trip, and a second one if
// nothing was changed. As any update does, it waits for a transaction that is changing the row: set lock_timeout, or use
// [Advance], which does not wait.
func Exec(ctx context.Context, tx pgx.Tx, row Row, expected int64, sql string, args ...any) (int64, error) {
	if err := checkExec(ctx, tx, row, expected, sql, args); err != nil {
		return 0, err
	}
	all := append(append(append(make([]any, 0, len(row.Key)+1+len(args)), row.Key...), expected), args...)
	version, err := change(ctx, tx, expected, sql, all)
	switch {
	case errors.Is(err, errUnchanged):
		return 0, row.explain(ctx, tx, expected)
	case errors.Is(err, ErrUnsafe):
		spoil(ctx, tx)
	}
	if err != nil {
		return 0, fmt.Errorf("optimistic: row %s: %w", row, check.Ended(err))
	}
	return version, nil
}

func checkExec(ctx context.Context, tx pgx.Tx, row Row, expected int64, sql string, args []any) error {
	var errs []error
	refuse := func(bad bool, field, problem string) {
		if bad {
			errs = append(errs, &commitbox.InputError{Field: field, Problem: problem})
		}
	}
	refuse(row.Look == "", "Row.Look", "is empty")
	refuse(len(row.Key) == 0, "Row.Key", "is empty")
	refuse(sql == "", "sql", "is empty")
	for _, arg := range append(append([]any{}, row.Key...), args...) {
		switch arg.(type) {
		case pgx.QueryRewriter, pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID:
			refuse(true, "args", "must be plain values, one for each of $1, $2 and so on")
		}
	}
	return errors.Join(append(errs, checkVersion(expected), check.Tx(ctx, tx))...)
}

func checkVersion(expected int64) error {
	if expected < 0 || expected == math.MaxInt64 {
		return &commitbox.InputError{Field: "expected", Problem: "is not a version: it is negative or the largest number"}
	}
	return nil
}

var errUnchanged = errors.New("no row was changed")

// change sends the statement and reads what it returns.
func change(ctx context.Context, tx pgx.Tx, expected int64, sql string, args []any) (version int64, err error) {
	rows, err := tx.Query(ctx, sql, args...)
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	var changed int64
	for rows.Next() {
		changed++
		if err := rows.Scan(&version); err != nil {
			return 0, fmt.Errorf("%w: what it returns is not a version: %w", ErrUnsafe, err)
		}
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return 0, err
	}
	switch {
	case len(rows.FieldDescriptions()) == 0:
		return 0, fmt.Errorf("%w: it has no returning clause", ErrUnsafe)
	case changed == 0:
		return 0, errUnchanged
	case changed > 1:
		return 0, fmt.Errorf("%w: it has changed %d rows", ErrUnsafe, changed)
	case version != expected+1:
		return 0, fmt.Errorf("%w: it has returned version %d for an expected %d: compare the version, and raise it by one", ErrUnsafe, version, expected)
	}
	return version, nil
}

// explain says why no row was changed. It looks in a statement of its own, because the first one's snapshot is from before
// it waited for the row.
func (r Row) explain(ctx context.Context, tx pgx.Tx, expected int64) error {
	e := &Error{Resource: r.String(), Expected: expected}
	rows, err := tx.Query(ctx, r.Look, r.Key...)
	if err == nil {
		e.Actual, err = pgx.CollectExactlyOneRow(rows, pgx.RowTo[int64])
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		e.reason = ErrNotFound
	case err != nil:
		return fmt.Errorf("optimistic: row %s: look up its version: %w", r, check.Ended(err))
	case e.Actual == expected:
		e.reason = ErrCondition
	default:
		e.reason = ErrConflict
	}
	return e
}

// String returns the key as it stands in errors.
func (r Row) String() string {
	if len(r.Key) == 1 {
		return fmt.Sprint(r.Key[0])
	}
	return fmt.Sprint(r.Key...)
}

// spoilTimeout bounds the statement that makes a transaction unusable.
const spoilTimeout = 10 * time.Second

// spoil makes a transaction unusable by a statement that fails. Where that does not come to PostgreSQL, because rows are
// open or the connection is gone, it rolls back.
func spoil(ctx context.Context, tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), spoilTimeout)
	defer cancel()
	if _, err := tx.Exec(ctx, schema.Spoil); !errors.As(err, new(*pgconn.PgError)) {
		_ = tx.Rollback(ctx) // if it fails too, there is no transaction any more
	}
}
