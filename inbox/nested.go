package inbox

import (
	"context"
	"slices"
	"sync/atomic"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/schema"
)

// running is what is being handled. It travels in the context, so that a handler that asks for its own message is
// refused: in its own transaction it would see its own unfinished row as completed.
type running struct {
	schema schema.Name
	ids    []ID
	scopes []any // the connection and the pool on which it runs
	left   atomic.Bool
	outer  *running
}

type runningKey struct{}

// enter notes that ids are being handled on the scopes, until leave is called.
func (s *settings) enter(ctx context.Context, ids []ID, scopes ...any) (_ context.Context, leave func()) {
	outer, _ := ctx.Value(runningKey{}).(*running)
	r := &running{schema: s.schema, ids: ids, scopes: scopes, outer: outer}
	return context.WithValue(ctx, runningKey{}, r), r.leave
}

func (r *running) leave() { r.left.Store(true) }

// isNested says that a caller of this call is handling the message on the scope.
func (s *settings) isNested(ctx context.Context, id ID, scope any) bool {
	r, _ := ctx.Value(runningKey{}).(*running)
	for ; r != nil; r = r.outer {
		if !r.left.Load() && r.schema == s.schema && slices.Contains(r.scopes, scope) && slices.Contains(r.ids, id) {
			return true
		}
	}
	return false
}

// scopeOf is what a transaction and the savepoints in it have in common: the connection, or where there is none to be seen,
// what the transaction says of itself.
func scopeOf(tx pgx.Tx) any {
	if conn := tx.Conn(); conn != nil {
		return conn
	}
	if scoped, ok := tx.(interface{ Scope() any }); ok {
		return scoped.Scope()
	}
	return tx
}
