package outbox_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

func TestP9_B17_LateCommitIsNotSkipped(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))

	late := begin(t, db)
	if _, err := outbox.Enqueue(t.Context(), late, message("a", "late")); err != nil {
		t.Fatal(err)
	}
	enqueue(t, db, message("b", "early"))
	eventually(t, "the message that committed first", func() bool { return len(p.payloads()) == 1 })
	for i := range 50 { // the floors move on as far as they may
		enqueue(t, db, message("c", fmt.Sprint(i)))
	}
	eventually(t, "50 more", func() bool { return len(p.payloads("c")) == 50 })
	time.Sleep(300 * time.Millisecond)
	if err := late.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the late one", func() bool { return len(p.payloads("a")) == 1 })
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
}

// Writers that serialise per key by a row lock and hold their transactions for up to 50 ms after they have enqueued.
func TestP8_B17_SequenceOrderIsCommitOrderForSerialisedWriters(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if _, err := db.Pool.Exec(t.Context(), "create table account (key text primary key, n int not null default 0); insert into account select 'k' || g from generate_series(0, 4) g"); err != nil {
		t.Fatal(err)
	}
	p := &recorder{fail: func(r outbox.Record) error {
		if rand.IntN(20) == 0 {
			return errRefused
		}
		return nil
	}}
	cfg := brisk()
	cfg.BackoffBase, cfg.BackoffMax = 5*time.Millisecond, 20*time.Millisecond
	start(t, newRelay(t, db.Pool, p, cfg))

	const writers, each = 8, 30
	var group sync.WaitGroup
	committed := make([]int, 5)
	var mu sync.Mutex
	for range writers {
		group.Go(func() {
			for range each {
				k, keep := rand.IntN(5), rand.IntN(5) > 0
				err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
					var n int
					if err := tx.QueryRow(t.Context(), "update account set n = n + 1 where key = $1 returning n", fmt.Sprint("k", k)).Scan(&n); err != nil {
						return err
					}
					if _, err := outbox.Enqueue(t.Context(), tx, message(fmt.Sprint("k", k), fmt.Sprint(n))); err != nil {
						return err
					}
					time.Sleep(rand.N(50 * time.Millisecond))
					if !keep {
						return pgx.ErrTxClosed
					}
					return nil
				})
				if err == nil {
					mu.Lock()
					committed[k]++
					mu.Unlock()
				}
			}
		})
	}
	group.Wait()
	total := 0
	for _, n := range committed {
		total += n
	}
	eventually(t, fmt.Sprint(total, " messages"), func() bool { return len(p.payloads()) == total })
	for k, n := range committed {
		var want []string
		for i := range n {
			want = append(want, fmt.Sprint(i+1))
		}
		if diff := cmp.Diff(want, p.payloads(fmt.Sprint("k", k))); diff != "" {
			t.Errorf("key k%d (-committed +published):\n%s", k, diff)
		}
	}
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
}

func TestB18_PositionsThatGoBackAreNoticed(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	for i := range 10 {
		enqueue(t, db, message("", fmt.Sprint(i)))
	}
	eventually(t, "ten messages, deleted", func() bool { return len(p.payloads()) == 10 && tables(t, db) == settled })
	// A restore or a promoted standby: the sequence stands lower than before.
	if _, err := db.Pool.Exec(t.Context(), "select setval('commitbox.outbox_seq', 2)"); err != nil {
		t.Fatal(err)
	}
	enqueue(t, db, message("", "after"))
	eventually(t, "the message below the floors", func() bool { return len(p.payloads()) == 11 })
}

// A standby that had not got everything is promoted: deletes are lost, and positions are drawn a second time. Copies come,
// which nobody promises to prevent, but nothing is lost, and new messages below the old floors are found.
func TestH10_AFailoverThatLostDeletesAndPositionsLosesNoMessage(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	exec := func(sql string) {
		t.Helper()
		_, err := db.Pool.Exec(t.Context(), sql)
		must(t, err)
	}
	p := &recorder{}
	var want []string
	for i := range 10 {
		enqueue(t, db, message("k", fmt.Sprint(i)))
		want = append(want, fmt.Sprint(i))
	}
	exec("create table standby as select id, message_id, channel, key, topic, payload from commitbox.outbox_message order by id limit 8")
	proxy := testenv.NewProxy(t, db.URL)
	start(t, newRelay(t, openPool(t, proxy.URL(t, db.URL)), p, brisk()))
	eventually(t, "ten messages", func() bool { return len(p.payloads()) == 10 && tables(t, db) == settled })
	proxy.Refuse(true) // nothing but the lost connections tells the relay: it finds the position where it was
	proxy.Cut()
	exec(`insert into commitbox.outbox_message (id, message_id, channel, key, topic, payload) select * from standby;
		select setval('commitbox.outbox_seq', (select max(id) from standby))`)
	want = append(want, want[:8]...) // the copies
	enqueue(t, db, message("k", "after"), message("k", "after that"))
	want = append(want, "after", "after that")
	proxy.Refuse(false)
	eventually(t, "the copies, and the new ones behind them", func() bool { return len(p.payloads()) == len(want) })
	if diff := cmp.Diff(want, p.payloads()); diff != "" {
		t.Errorf("(-want +published):\n%s", diff)
	}
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
}

func TestA1_ALeakedWriterIsFoundWhenItEnds(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	cfg := brisk()
	cfg.MaxWriterAge = 300 * time.Millisecond
	start(t, newRelay(t, db.Pool, p, cfg))
	leaked := begin(t, db)
	if _, err := outbox.Enqueue(t.Context(), leaked, message("a", "leaked")); err != nil {
		t.Fatal(err)
	}
	for i := range 30 { // long enough for the floors to pass it
		enqueue(t, db, message("a", fmt.Sprint(i)))
		time.Sleep(50 * time.Millisecond)
	}
	if err := leaked.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the leaked message", func() bool { return len(p.payloads()) == 31 })
}

// Writers that hold their transactions for long, much longer than anything that a relay could wait for, beside one that
// was leaked: the order of the keys holds for all but the leaked one, which overtakes nothing and is overtaken, and is not
// lost. The long form holds for 40 s, with the standard MaxWriterAge and a leaked writer past it.
func TestP8_WritersThatHoldForLongAndALeakedOne(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	hold, age := soak(time.Second, 40*time.Second), soak(3*time.Second, 60*time.Second)
	if _, err := db.Pool.Exec(t.Context(), "create table account (key text primary key, n int not null default 0); insert into account select 'k' || g from generate_series(0, 3) g"); err != nil {
		t.Fatal(err)
	}
	p := &recorder{}
	cfg := brisk()
	cfg.MaxWriterAge = age
	passed := new(passedWriters)
	cfg.Observer = passed
	start(t, newRelay(t, db.Pool, p, cfg))
	leaked := begin(t, db)
	if _, err := outbox.Enqueue(t.Context(), leaked, message("leaked", "leaked")); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	var group sync.WaitGroup
	committed := make([]atomic.Int32, 4)
	for w := range 8 {
		group.Go(func() {
			long := w < 4 // one long writer for each key, and one that follows it closely
			for time.Since(began) < age+hold {
				k := w % 4
				err := pgx.BeginFunc(t.Context(), db.Pool, func(tx pgx.Tx) error {
					var n int
					if err := tx.QueryRow(t.Context(), "update account set n = n + 1 where key = $1 returning n", fmt.Sprint("k", k)).Scan(&n); err != nil {
						return err
					}
					_, err := outbox.Enqueue(t.Context(), tx, message(fmt.Sprint("k", k), fmt.Sprint(n)))
					if long {
						time.Sleep(hold/2 + rand.N(hold/2))
					}
					return err
				})
				if err != nil {
					t.Error(err)
					return
				}
				committed[k].Add(1)
				if long {
					time.Sleep(hold / 10) // the others' turn, which draw later positions and commit first
				}
			}
		})
	}
	for i := 0; time.Since(began) < age+hold; i++ { // others draw and commit all the time, so that the floors would move
		enqueue(t, db, message(fmt.Sprint("other", i%50), fmt.Sprint(i)))
		time.Sleep(5 * time.Millisecond)
	}
	group.Wait()
	if n := passed.Load(); n != 1 {
		t.Errorf("%d writers are passed, want the leaked one", n)
	}
	if err := leaked.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the leaked message", func() bool { return len(p.payloads("leaked")) == 1 })
	eventually(t, "empty tables", func() bool { return tables(t, db) == settled })
	for k := range committed {
		var want []string
		for i := range committed[k].Load() {
			want = append(want, fmt.Sprint(i+1))
		}
		if diff := cmp.Diff(want, p.payloads(fmt.Sprint("k", k))); diff != "" {
			t.Errorf("key k%d (-committed +published):\n%s", k, diff)
		}
	}
}

// passedWriters keeps the number of writers that a relay does not wait for any more.
type passedWriters struct{ atomic.Int64 }

func (w *passedWriters) Observe(m *commitbox.Metric, value float64, _ ...string) {
	if m == commitbox.OutboxLeakedWriters {
		w.Store(int64(value))
	}
}
