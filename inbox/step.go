package inbox

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
)

const stepNameLenMax = 200

// Step runs one named part of leased work, such as a charge, and stores its result; a later lease of the message gets
// the stored result and does not run it. The name is 1 to 200 bytes and means the same in every version of the code.
//
// ErrLeaseLost says that the lease was taken over: found before fn ran, fn did not run; found after it, fn ran and its
// result is not stored. An error of fn is returned and nothing is stored.
//
// One call of a name runs at a time; another one waits for its end and gets the stored result, or runs if there is none.
//
// What is not promised: a crash between fn and the store runs fn again under the next lease. What must not happen twice
// needs a key that the other side recognises; the message's id is one.
func Step[R any](ctx context.Context, lease *Lease, name string, fn func(ctx context.Context) (R, error)) (R, error) {
	var none R
	err := check.Text("name", name, stepNameLenMax)
	if fn == nil {
		err = errors.Join(err, &commitbox.InputError{Field: "fn", Problem: "is nil"})
	}
	if err != nil {
		return none, err
	}
	leave, err := lease.steps.enter(ctx, name)
	if err != nil {
		return none, err
	}
	defer leave()
	row, err := lease.lookStep(ctx, name)
	switch {
	case err != nil:
		return none, err
	case row.Stored:
		return decode[R](row.Result)
	}
	bound, cancel := lease.Bind(ctx)
	defer cancel()
	value, err := fn(bound)
	if err != nil {
		return none, err
	}
	stored, err := roundTrip(&value, lease.box.ResultMax)
	if err != nil {
		return none, err
	}
	return value, lease.storeStep(ctx, name, stored)
}

func (l *Lease) lookStep(ctx context.Context, name string) (db.InboxStepLookRow, error) {
	row, err := l.queries(l.box.pool).InboxStepLook(ctx, db.InboxStepLookParams{
		Consumer: l.msg.ID.Consumer, MessageID: l.msg.ID.Message, Epoch: l.epoch, Token: l.token, Name: name,
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return row, l.lost()
	}
	if err != nil {
		return row, l.unavailable(err)
	}
	return row, nil
}

// storeStep stores a step's result. The end of ctx does not keep it from being sent, because the step has happened.
func (l *Lease) storeStep(ctx context.Context, name string, stored []byte) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	var n int64
	err := l.box.persist(ctx, func() (err error) {
		n, err = l.queries(l.box.pool).InboxStepStore(ctx, db.InboxStepStoreParams{
			Consumer: l.msg.ID.Consumer, MessageID: l.msg.ID.Message, Epoch: l.epoch, Token: l.token, Name: name, Result: stored,
		})
		return err
	})
	if err != nil {
		return l.unavailable(err)
	}
	if n > 0 {
		return nil
	}
	row, err := l.lookStep(ctx, name)
	if err == nil && !row.Stored {
		return l.lost()
	}
	return err
}

// named lets one caller in at a time for each name.
type named struct {
	mu    sync.Mutex
	gates map[string]chan struct{}
}

// enter waits for its turn until ctx ends, whose cause it then returns.
func (n *named) enter(ctx context.Context, name string) (leave func(), err error) {
	n.mu.Lock()
	if n.gates == nil {
		n.gates = map[string]chan struct{}{}
	}
	gate := n.gates[name]
	if gate == nil {
		gate = make(chan struct{}, 1)
		n.gates[name] = gate
	}
	n.mu.Unlock()
	select {
	case gate <- struct{}{}:
		return func() { <-gate }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
