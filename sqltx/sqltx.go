// Package sqltx lets a transaction of database/sql, or of a library on top of it, be used where commitbox takes a pgx.Tx:
//
//	tx, err := db.BeginTx(ctx, nil) // *sql.Tx; also of sqlx, GORM, bun and ent
//	ids, err := outbox.Enqueue(ctx, sqltx.From(tx), outbox.Message{Topic: "orders.paid", Payload: body})
//	err = tx.Commit()
//
// It needs nothing of pgx underneath: lib/pq does as well. What is passed for the libraries:
//
//   - database/sql: the *sql.Tx. sqlx: the *sqlx.Tx. ent: the *ent.Tx of a client generated with --feature sql/execquery.
//   - GORM, inside Transaction(func(tx *gorm.DB) error): tx.Statement.ConnPool.(gorm.Tx), with PrepareStmt too.
//   - bun: tx.Tx, the *sql.Tx inside. A bun.Tx formats queries itself and loses their arguments; it is refused with an
//     *commitbox.InputError.
//
// Behind a transaction pooler, such as PgBouncer, the driver must not keep prepared statements: pgx with
// default_query_exec_mode=exec or simple_protocol, lib/pq as it is, GORM without PrepareStmt.
//
// # What is different
//
// database/sql shows less of a connection than pgx does, and sends one statement per round trip: a batch is as many round
// trips as it has statements. These are not promised:
//
//   - What PostgreSQL says of the transaction's state is not seen. A transaction that was ended by its own methods, or by its
//     context, is known as ended; one in which COMMIT was sent as text is not. With the savepoint of inbox.Handle it is
//     noticed when the savepoint is missed, and Handle fails; with NoSavepoint and no result it is not noticed, and what is
//     written after the COMMIT is committed one by one.
//   - An error of a statement that was swallowed, and rows that were left open, are noticed by the next statement.
//   - A context given to BeginTx rolls the transaction back when it ends, and then the failure of a handler cannot be
//     recorded in it: inbox.Handle answers ErrUnavailable if its ctx was cancelled too. Begin with
//     context.WithoutCancel(ctx) to keep that possible.
//   - The number of rows is all that a command tag holds. A driver that does not tell it gets an error: a claim is known by it.
//   - A connection that breaks may be reported as driver.ErrBadConn and nothing else.
package sqltx

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"reflect"
	"strconv"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/schema"
)

// Tx is a transaction of database/sql. A *sql.Tx is one, a *sql.DB is not: what is written with it would be committed on its
// own.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	Commit() error
	Rollback() error
}

// From returns a view of the transaction as a pgx.Tx. It sends nothing and may be called any number of times; the
// transaction is ended by its own methods or by those of the view, once. Like a pgx.Tx, it is for one goroutine at a time,
// and rows are closed before the next statement.
//
// Begin sets a savepoint. SendBatch runs the statements one after the other. A QueryRewriter (pgx.NamedArgs) works, other
// options of pgx in front of the arguments are ignored. Slices, except of bytes, and maps become text in PostgreSQL's
// syntax, by their type or by the cast of the parameter, $1::jsonb[] or cast($1 as jsonb[]); anything else is given to the
// driver as it is. Values are read with the types that the driver names; of a type without a name, as text.
//
// Errors of other drivers than pgx that carry a SQLSTATE are *pgconn.PgError too. After the end of the transaction,
// everything answers pgx.ErrTxClosed. Not there: CopyFrom and Prepare (errors.ErrUnsupported), LargeObjects (whose methods
// answer pgx.ErrTxClosed) and Conn, which is nil.
func From(tx Tx) pgx.Tx {
	v := reflect.ValueOf(tx)
	switch {
	case !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil():
		return nil
	case formats(v.Type()):
		return view{tx: refused{&commitbox.InputError{Field: "tx", Problem: "is a bun.Tx, which formats queries itself and loses their arguments; pass its field Tx"}}}
	case !v.Comparable():
		return view{tx: &boxed{tx}}
	}
	return view{tx: tx}
}

// formats says that a type is known to format queries itself.
func formats(t reflect.Type) bool {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t.PkgPath() == "github.com/uptrace/bun" && t.Name() == "Tx"
}

// boxed makes a transaction comparable.
type boxed struct{ Tx }

// refused answers everything with an error.
type refused struct{ err error }

func (r refused) ExecContext(context.Context, string, ...any) (sql.Result, error) { return nil, r.err }

func (r refused) QueryContext(context.Context, string, ...any) (*sql.Rows, error) { return nil, r.err }
func (r refused) Commit() error                                                   { return r.err }
func (r refused) Rollback() error                                                 { return r.err }

// view is a transaction, or a savepoint in it. It has no state of its own but a savepoint's, so that two views of one
// transaction are equal.
type view struct {
	tx        Tx
	savepoint *savepoint // nil: the transaction
}

type savepoint struct {
	number int64
	closed bool
}

// savepoints numbers them, so that those of two views do not hide each other.
var savepoints atomic.Int64

// Scope is the transaction that several views of it have in common.
func (v view) Scope() any { return v.tx }

func (v view) closed() bool { return v.savepoint != nil && v.savepoint.closed }

func (v view) Begin(ctx context.Context) (pgx.Tx, error) {
	inner := view{v.tx, &savepoint{number: savepoints.Add(1)}}
	if _, err := v.Exec(ctx, schema.NumberedSavepoint(inner.savepoint.number)); err != nil {
		return nil, err
	}
	return inner, nil
}

// Commit commits, or releases the savepoint. With a ctx that has ended it rolls back: database/sql takes no context there.
func (v view) Commit(ctx context.Context) error {
	if v.savepoint != nil {
		return v.leave(ctx, schema.ReleaseNumbered)
	}
	if err := ctx.Err(); err != nil {
		return errors.Join(err, translate(v.tx.Rollback()))
	}
	return translate(v.tx.Commit())
}

// Rollback rolls back, or to the savepoint. The ctx counts for a savepoint only. Where that cannot be sent, because rows are
// open or ctx has ended, the whole transaction is rolled back: what was to be undone must not be committed.
func (v view) Rollback(ctx context.Context) error {
	if v.savepoint == nil {
		return translate(v.tx.Rollback())
	}
	err := v.leave(ctx, schema.RollbackNumbered)
	if err != nil && !errors.Is(err, pgx.ErrTxClosed) && !errors.As(err, new(*pgconn.PgError)) {
		err = errors.Join(err, translate(v.tx.Rollback()))
	}
	return err
}

func (v view) leave(ctx context.Context, statement func(int64) string) error {
	_, err := v.Exec(ctx, statement(v.savepoint.number))
	v.savepoint.closed = true
	return err
}

func (v view) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	sql, args, err := v.bind(ctx, sql, args)
	if err != nil {
		return pgconn.CommandTag{}, err
	}
	result, err := v.tx.ExecContext(ctx, sql, args...)
	if err != nil {
		return pgconn.CommandTag{}, translate(err)
	}
	n, err := result.RowsAffected()
	if err != nil { // no row and not known are two things: a claim that wrote none is somebody else's
		return pgconn.CommandTag{}, fmt.Errorf("sqltx: the driver does not count rows: %w", err)
	}
	return tag(n), nil
}

func tag(n int64) pgconn.CommandTag { return pgconn.NewCommandTag(strconv.FormatInt(n, 10)) }

func (v view) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	sql, args, err := v.bind(ctx, sql, args)
	if err != nil {
		return &rows{err: err}, err
	}
	found, err := v.tx.QueryContext(ctx, sql, args...)
	if err != nil {
		err = translate(err)
		return &rows{err: err}, err
	}
	return newRows(found)
}

func (v view) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	found, err := v.Query(ctx, sql, args...)
	return row{found, err}
}

// row is the first of the rows.
type row struct {
	pgx.Rows
	err error
}

func (r row) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	defer r.Close()
	if !r.Next() {
		if err := r.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.Rows.Scan(dest...); err != nil {
		return err
	}
	r.Close()
	return r.Err()
}

func (v view) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	switch {
	case v.closed():
		return pgx.FailedBatchResults(b, pgx.ErrTxClosed)
	case pgx.FailedBatchResults(b, nil).Tx() != nil:
		return pgx.FailedBatchResults(b, unsupported("Batch.BeginTx"))
	case b.Len() == 0:
		return &results{view: v, err: v.ended(ctx)}
	}
	return &results{view: v, ctx: ctx, queue: b.QueuedQueries}
}

// ended asks database/sql, without a round trip, whether the transaction has ended. There is no method for that; so it is
// asked for something that it refuses before it calls the driver, but not before it has looked whether the transaction is
// still there: a statement of no database, or where the transaction is none of database/sql itself, an argument with an
// impossible name.
func (v view) ended(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx)
	var err error
	if tx, ok := v.tx.(interface {
		StmtContext(ctx context.Context, stmt *sql.Stmt) *sql.Stmt
	}); ok {
		_, err = tx.StmtContext(ctx, new(sql.Stmt)).ExecContext(ctx)
	} else {
		_, err = v.tx.ExecContext(ctx, "", sql.Named("!", nil))
	}
	if err = translate(err); errors.Is(err, pgx.ErrTxClosed) || errors.As(err, new(*commitbox.InputError)) {
		return err
	}
	return nil
}

func (v view) Prepare(context.Context, string, string) (*pgconn.StatementDescription, error) {
	return nil, unsupported("Prepare")
}

func (v view) CopyFrom(context.Context, pgx.Identifier, []string, pgx.CopyFromSource) (int64, error) {
	return 0, unsupported("CopyFrom")
}

func unsupported(method string) error {
	return fmt.Errorf("sqltx: %s is not possible through database/sql: %w", method, errors.ErrUnsupported)
}

// LargeObjects returns what is closed already: pgx leaves no other way to make one.
func (v view) LargeObjects() pgx.LargeObjects {
	batch := new(pgx.Batch)
	batch.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(batch, pgx.ErrTxClosed).Tx().LargeObjects()
}

// Conn returns nil: database/sql does not show the connection of a transaction.
func (v view) Conn() *pgx.Conn { return nil }
