package inbox

import (
	"context"
	"sync"
	"time"
)

// asksMax bounds how many questions of a batch are on their way to the cache at one time.
const asksMax = 16

// sharesRows says that many messages can be claimed together: by their rows alone.
func (b *Box) sharesRows() bool {
	p := b.policy
	return p == nil || p.snapshot != nil && p.row && !p.token && !p.readToken
}

// askFront answers the messages of a batch that the cache knows, and returns the others.
func (b *batch[R]) askFront(ctx context.Context, todo []int) (left []int) {
	if b.box == nil || b.box.Policies == nil || b.box.Cache == nil {
		return todo
	}
	known := make([]bool, len(todo))
	inParallel(len(todo), func(n int) {
		start, m := time.Now(), &b.msgs[todo[n]]
		box, over := b.box.under(m.ID.Consumer)
		defer over()
		var v verdict
		if v, known[n] = box.askFront(ctx, m); known[n] {
			b.answers[todo[n]].Result, b.answers[todo[n]].Err = answer(ctx, &box.settings, m.ID, v, *new(R), start)
		}
	})
	for n, i := range todo {
		if !known[n] {
			left = append(left, i)
		}
	}
	return left
}

// fill keeps copies of the rows that a batch has committed.
func (b *batch[R]) fill(ctx context.Context, done []int, results [][]byte, start time.Time) {
	if b.box.policy == nil || !b.box.policy.front {
		return
	}
	for n, i := range done {
		m := &b.msgs[i]
		var stored []byte
		if results != nil {
			stored = results[n]
		}
		b.box.fill(ctx, m.ID, b.box.completedSince(start, m.Fingerprint, stored))
	}
}

// inParallel calls do for 0 to n-1, some at a time.
func inParallel(n int, do func(int)) {
	var group sync.WaitGroup
	next := make(chan int)
	for range min(n, asksMax) {
		group.Go(func() {
			for i := range next {
				do(i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	group.Wait()
}
