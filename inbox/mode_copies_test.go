package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// dying is a cache before which the process dies: it keeps nothing.
type dying struct {
	inbox.Cache
	put func(inbox.ID)
}

func (d dying) Put(_ context.Context, _ inbox.Identity, id inbox.ID, _ inbox.CacheEntry, _ time.Duration) error {
	d.put(id)
	return errors.New("it dies")
}

// A copy is written when the row is committed, and not before. Who dies between the two leaves the row, which is an answer.
func TestB48_TheCopyIsWrittenAfterTheCommit(t *testing.T) {
	g := newGuarded(t, inbox.ModeDouble)
	var mu sync.Mutex
	puts := map[inbox.ID]int{}
	box := g.world.box(inbox.Config{Policies: g.policies, Cache: dying{g.front, func(of inbox.ID) {
		g.wantRow(of, "completed", 1)
		g.wantEffects(of, 1)
		mu.Lock()
		defer mu.Unlock()
		puts[of]++
	}}})
	g.want("Process", g.process(box, "p"), "executed by table")
	batch := []inbox.Message{{ID: id("a")}, {ID: id("b")}}
	for _, a := range inbox.ProcessBatch(t.Context(), box, batch, func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]string, error) {
		return []string{"value of a", "value of b"}, errors.Join(write(ctx, tx, id("a"), ""), write(ctx, tx, id("b"), ""))
	}) {
		if a.Err != nil || a.Outcome != inbox.Executed {
			t.Errorf("ProcessBatch: %+v", a)
		}
	}
	if _, err := inbox.ProcessLeased(t.Context(), box, inbox.Message{ID: id("l")}, func(ctx context.Context, lease *inbox.Lease) (string, error) {
		return inbox.CompleteIn(ctx, lease, func(ctx context.Context, tx pgx.Tx) (string, error) {
			return "value of l", write(ctx, tx, id("l"), "")
		})
	}); err != nil {
		t.Errorf("ProcessLeased: %v", err)
	}
	for _, message := range []string{"p", "a", "b", "l"} {
		box.AwaitCopies()
		mu.Lock()
		n := puts[id(message)]
		mu.Unlock()
		if n != 1 {
			t.Errorf("%s was put %d times", message, n)
		}
		g.want("after the death", g.process(g.box, message), "replayed by table")
		g.wantEffects(id(message), 1)
	}
}

// held is a cache that takes what it is given once it is let go.
type held struct {
	inbox.Cache
	open chan struct{}
}

func (h held) Put(ctx context.Context, of inbox.Identity, id inbox.ID, e inbox.CacheEntry, ttl time.Duration) error {
	<-h.open
	return h.Cache.Put(ctx, of, id, e, ttl)
}

// A caller does not wait for the copy, and may do as it likes with what it has given and got.
func TestF7_P12_WhatACallerChangesAfterwardsIsNotInTheCopy(t *testing.T) {
	g := newGuarded(t, inbox.ModeDouble)
	h := held{g.front, make(chan struct{})}
	box := g.world.box(inbox.Config{Policies: g.policies, Cache: h})
	m := inbox.Message{ID: id("m"), Fingerprint: []byte("fingerprint")}
	handler := func(context.Context, pgx.Tx) ([]byte, error) { return []byte("result"), nil }
	first, err := inbox.Process(t.Context(), box, m, handler)
	if err != nil {
		t.Fatal(err)
	}
	m.Fingerprint[1], first.Value[1] = 'X', 'X'
	close(h.open)
	box.AwaitCopies()
	m.Fingerprint = []byte("fingerprint")
	again, err := inbox.Process(t.Context(), g.box, m, handler)
	if err != nil || again.DecidedBy != inbox.ByCache || string(again.Value) != "result" {
		t.Errorf("%q by %s, %v", again.Value, again.DecidedBy, err)
	}
}

// asked is a cache that counts its look-ups.
type asked struct {
	inbox.Cache
	n *atomic.Int64
}

func (a asked) Get(ctx context.Context, of inbox.Identity, id inbox.ID) (inbox.CacheEntry, bool, error) {
	a.n.Add(1)
	return a.Cache.Get(ctx, of, id)
}

// Where a thousand look-ups have found nothing, one in eight is made, until one finds a copy. What is delivered again is looked
// up always.
func TestA10_LookUpsThatFindNothingBecomeRare(t *testing.T) {
	g := newGuarded(t, inbox.ModeDouble)
	a := asked{g.front, new(atomic.Int64)}
	box := g.world.box(inbox.Config{Policies: g.policies, Cache: a})
	lookUps := func(what string, want, first, n, delivery int) {
		t.Helper()
		before := a.n.Load()
		for i := first; i < first+n; i++ {
			m := inbox.Message{ID: id(fmt.Sprint(i)), Delivery: delivery}
			if _, err := inbox.Process(t.Context(), box, m, func(context.Context, pgx.Tx) (int, error) { return 0, nil }); err != nil {
				t.Fatal(err)
			}
		}
		box.AwaitCopies()
		if got := int(a.n.Load() - before); got != want {
			t.Errorf("%s: %d look-ups, want %d", what, got, want)
		}
	}
	lookUps("new", 1000, 0, 1000, 0)
	lookUps("new, after many", 10, 1000, 80, 0)
	lookUps("new, but delivered again", 80, 2000, 80, 2)
	lookUps("copies, until one is found", 1, 0, 8, 0)
	lookUps("copies", 80, 8, 80, 0)
}

// Many copies of one message at a time cost a few statements and not a few for each, and unknown ids leave nothing.
func TestA10_CopiesOfOneMessageAtATimeCostAFewStatements(t *testing.T) {
	w := newWorld(t)
	var counter *testenv.WireCounter
	w.Pool, counter = w.CountedPool(t)
	g := guard(w, newFront(t, testenv.Redis(t)), inbox.ModeDouble)
	g.process(g.box, "hot")
	g.front.clear(t)
	wire := counter.Measure(func() {
		var group sync.WaitGroup
		for range 10_000 {
			group.Go(func() {
				res, err := inbox.Process(context.Background(), g.box, inbox.Message{ID: id("hot")}, func(context.Context, pgx.Tx) (string, error) {
					return "", errors.New("it runs again")
				})
				if err != nil || !res.Replayed {
					t.Errorf("%+v %v", res, err)
				}
			})
		}
		group.Wait()
	})
	if wire.Statements > 60 { // four for each question, until the copy has come to the cache
		t.Errorf("10 000 copies cost %d statements", wire.Statements)
	}
	before := g.front.keys(t)
	for i := range 20 {
		res, err := inbox.Process(t.Context(), g.box, inbox.Message{ID: id(fmt.Sprint("unknown ", i))}, func(context.Context, pgx.Tx) (string, error) {
			return "", errors.New("refused")
		})
		if !errors.Is(err, inbox.ErrFailed) {
			t.Errorf("%+v %v", res, err)
		}
	}
	if after := g.front.keys(t); after != before {
		t.Errorf("unknown ids left %d keys", after-before)
	}
}

// The same without a cache and without policies: the copies come while the first one waits for the database.
func TestA10_CopiesOfOneMessageShareTheTablesAnswer(t *testing.T) {
	w := newWorld(t)
	proxy := testenv.NewProxy(t, w.URL)
	behind := *w.DB
	behind.URL = proxy.URL(t, w.URL)
	pool, counter := behind.CountedPool(t)
	box, err := inbox.New(pool, inbox.Config{Logger: quiet})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil {
			t.Fatal(err)
		}
	}
	const n = 10_000
	var here atomic.Int64
	wire := counter.Measure(func() {
		proxy.BlackHole(testenv.ToClient)
		var group sync.WaitGroup
		for range n {
			group.Go(func() {
				here.Add(1)
				if res, err := inbox.Process(context.Background(), box, inbox.Message{ID: anID}, effect(anID)); err != nil || !res.Replayed {
					t.Errorf("%+v %v", res, err)
				}
			})
		}
		w.within(patience, "all copies are there", func() bool { return here.Load() == n })
		proxy.Heal()
		group.Wait()
	})
	if wire.Statements == 0 || wire.Statements > 40 {
		t.Errorf("%d copies cost %d statements", n, wire.Statements)
	}
	w.wantEffects(anID, 1)
}
