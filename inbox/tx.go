package inbox

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ownedTx is the transaction that a handler works in. The handler cannot end it, and it is dead once the handler has
// returned, because its connection goes back to the pool. Savepoints (Begin) work as always and die with it. What
// cannot be taken back is the connection itself (Conn) and pgx.LargeObjects, which hold on to what is under this.
type ownedTx struct {
	tx    pgx.Tx
	ended atomic.Bool // of the transaction, not of a savepoint
	outer *ownedTx    // of a savepoint: the transaction
}

func (o *ownedTx) transaction() *ownedTx {
	if o.outer != nil {
		return o.outer
	}
	return o
}

func (o *ownedTx) live() pgx.Tx {
	if o.transaction().ended.Load() {
		return closedTx
	}
	return o.tx
}

func (o *ownedTx) Begin(ctx context.Context) (pgx.Tx, error) {
	savepoint, err := o.live().Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &ownedTx{tx: savepoint, outer: o.transaction()}, nil
}

func (o *ownedTx) Commit(ctx context.Context) error {
	if o.outer == nil && !o.ended.Load() {
		return ErrTxOwned
	}
	return o.live().Commit(ctx)
}

func (o *ownedTx) Rollback(ctx context.Context) error {
	if o.outer == nil && !o.ended.Load() {
		return ErrTxOwned
	}
	return o.live().Rollback(ctx)
}

func (o *ownedTx) Conn() *pgx.Conn                { return o.live().Conn() }
func (o *ownedTx) LargeObjects() pgx.LargeObjects { return o.live().LargeObjects() }

func (o *ownedTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	return o.live().CopyFrom(ctx, table, columns, rows)
}

func (o *ownedTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return o.live().SendBatch(ctx, b)
}

func (o *ownedTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	return o.live().Prepare(ctx, name, sql)
}

func (o *ownedTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return o.live().Exec(ctx, sql, args...)
}

func (o *ownedTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return o.live().Query(ctx, sql, args...)
}

func (o *ownedTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return o.live().QueryRow(ctx, sql, args...)
}

// closedTx answers everything with pgx.ErrTxClosed.
var closedTx = func() pgx.Tx {
	batch := new(pgx.Batch)
	batch.BeginTx(pgx.TxOptions{})
	return pgx.FailedBatchResults(batch, pgx.ErrTxClosed).Tx()
}()

// What a handler can leave behind without saying so.
var (
	errAborted  = errors.New("the handler returned without an error after a statement of its transaction had failed")
	errRowsOpen = errors.New("the handler returned before it closed its rows")
	errGoexit   = errors.New("the handler ended its goroutine")
)

// txState is what PostgreSQL said last about a connection's transaction.
type txState byte

const (
	stateUnseen  txState = 0   // the transaction has no pgx connection
	stateIdle    txState = 'I' // no transaction
	stateOpen    txState = 'T'
	stateAborted txState = 'E'
	stateBusy    txState = 'b' // rows are open
	stateClosed  txState = 'c' // the connection is gone
)

func stateOf(conn *pgx.Conn) txState {
	switch {
	case conn == nil:
		return stateUnseen
	case conn.IsClosed():
		return stateClosed
	case conn.PgConn().IsBusy():
		return stateBusy
	}
	return txState(conn.PgConn().TxStatus())
}

// cleanupTimeout bounds what has to be sent whatever became of the caller's context.
const cleanupTimeout = 5 * time.Second

func detached(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
}
