package scheduler

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"
)

// completerGrace is how long a completer whose time is up may take to return before the run goes on without it.
const completerGrace = 2 * time.Second

var errStuck = errors.New("it has not returned since its time was up")

// completed is what a completer said.
type completed struct {
	resumed int
	err     error
}

// resume calls the completers. One that panics or does not return keeps nothing from being removed.
func (r *cleaning) resume(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, r.c.cfg.Budget)
	defer cancel()
	for _, consumer := range slices.Sorted(maps.Keys(r.c.cfg.Completers)) {
		got := r.complete(ctx, consumer)
		r.report.Resumed += got.resumed
		if failure := (*PanicError)(nil); errors.As(got.err, &failure) {
			r.c.cfg.Logger.Error("cleanup: a completer panicked", "consumer", consumer, "error", failure, "stack", string(failure.Stack))
		}
		if got.err != nil {
			r.errs = append(r.errs, fmt.Errorf("completer of %s: %w", consumer, got.err))
		}
	}
}

// complete calls a completer, unless an earlier call of it is still at work.
func (r *cleaning) complete(ctx context.Context, consumer string) completed {
	waiting := r.c.waiting
	if earlier := waiting[consumer]; earlier != nil {
		select {
		case <-earlier:
			delete(waiting, consumer)
		default:
			return completed{err: errStuck}
		}
	}
	done := make(chan completed, 1)
	go func() {
		var got completed
		ended := <-guarded(ctx, func(ctx context.Context, _ Tick) (err error) {
			got.resumed, err = r.c.cfg.Completers[consumer](ctx)
			return err
		}, Tick{})
		got.err = ended.err
		done <- got
	}()
	select {
	case got := <-done:
		return got
	case <-ctx.Done():
	}
	grace := time.NewTimer(completerGrace)
	defer grace.Stop()
	select {
	case got := <-done:
		return got
	case <-grace.C:
		waiting[consumer] = done
		return completed{err: errStuck}
	}
}
