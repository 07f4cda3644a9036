package inbox

import "context"

// The ids that are being handled travel in the context, so that a handler that asks for its own message is refused:
// in its own transaction it would see its own unfinished row as completed.
type running struct {
	id    ID
	scope any // the connection or the pool on which it runs
	outer *running
}

type runningKey struct{}

func withRunning(ctx context.Context, id ID, scopes ...any) context.Context {
	outer, _ := ctx.Value(runningKey{}).(*running)
	for _, scope := range scopes {
		outer = &running{id, scope, outer}
	}
	return context.WithValue(ctx, runningKey{}, outer)
}

func isRunning(ctx context.Context, id ID, scope any) bool {
	r, _ := ctx.Value(runningKey{}).(*running)
	for ; r != nil; r = r.outer {
		if r.id == id && r.scope == scope {
			return true
		}
	}
	return false
}
