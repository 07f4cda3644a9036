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
// returned, because its connection goes back to the pool. Savepoints (Begin) work as always.
type ownedTx struct {
	tx    pgx.Tx
	ended atomic.Bool
}

func (o *ownedTx) live() pgx.Tx {
	if o.ended.Load() {
		return closedTx
	}
	return o.tx
}

func (o *ownedTx) Begin(ctx context.Context) (pgx.Tx, error) { return o.live().Begin(ctx) }
func (o *ownedTx) Commit(context.Context) error              { return o.refuse() }
func (o *ownedTx) Rollback(context.Context) error            { return o.refuse() }
func (o *ownedTx) Conn() *pgx.Conn                           { return o.live().Conn() }
func (o *ownedTx) LargeObjects() pgx.LargeObjects            { return o.live().LargeObjects() }

func (o *ownedTx) refuse() error {
	if o.ended.Load() {
		return pgx.ErrTxClosed
	}
	return ErrTxOwned
}

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
