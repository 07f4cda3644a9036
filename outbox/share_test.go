package outbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/outbox"
)

// owned lists how many shards each relay of a channel owns, greatest first.
func owned(t *testing.T, db *testenv.DB, channel string) []int {
	t.Helper()
	rows, _ := db.Pool.Query(t.Context(), `select count(s.shard)::int from commitbox.outbox_relay r left join commitbox.outbox_shard s on s.owner = r.owner
		where r.channel = $1 group by r.owner order by 1 desc`, channel)
	n, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func TestH6_RelaysShareEvenlyAndSettleDown(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	var stops []func() error
	for range 9 {
		stops = append(stops, start(t, newRelay(t, db.Pool, p, brisk())))
	}
	shares := func(want ...int) func() bool {
		return func() bool { return slices.Equal(owned(t, db, "default"), want) }
	}
	eventually(t, "nine relays to share 64 shards", shares(8, 7, 7, 7, 7, 7, 7, 7, 7))
	epochs := func() int { return count(t, db, "select sum(epoch)::bigint from commitbox.outbox_shard") }
	before := epochs()
	time.Sleep(2500 * time.Millisecond)
	if epochs() != before {
		t.Error("shards wander although nobody comes or goes")
	}
	for _, stop := range stops[:6] {
		if err := stop(); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "three relays to share 64 shards", shares(22, 21, 21))
	for i := range 100 {
		enqueue(t, db, message(fmt.Sprint("k", i), "x"))
	}
	eventually(t, "messages of all shards", func() bool { return len(p.payloads()) == 100 })
}

func TestA4_RacingRelaysNeverOwnAShardTwice(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	for round := range 50 {
		cfg := brisk()
		cfg.Channel, cfg.Lease = fmt.Sprint("c", round), time.Minute
		relays := make([]*outbox.Relay, 4)
		var group sync.WaitGroup
		for i := range relays {
			relays[i] = newRelay(t, db.Pool, &recorder{}, cfg)
			group.Go(func() {
				for range 3 {
					if _, err := relays[i].RunOnce(t.Context()); err != nil {
						t.Error(err)
					}
				}
			})
		}
		group.Wait()
		for range 4 { // until the first has given its surplus to the others
			for _, r := range relays {
				if _, err := r.RunOnce(t.Context()); err != nil {
					t.Error(err)
				}
			}
		}
		if diff := cmp.Diff([]int{16, 16, 16, 16}, owned(t, db, cfg.Channel)); diff != "" {
			t.Errorf("round %d: shares (-want +got):\n%s", round, diff)
		}
		if n := count(t, db, "select count(distinct epoch) from commitbox.outbox_shard where channel = $1", cfg.Channel); n != 64 {
			t.Errorf("round %d: %d epochs for 64 shards", round, n)
		}
		for _, r := range relays {
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func TestABrokenDestinationDelaysNoOtherChannel(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	away := brisk()
	away.Channel = "away"
	start(t, newRelay(t, db.Pool, outbox.PublishFunc(func(context.Context, outbox.Record) error { return outbox.Unavailable(errRefused) }), away))
	p := &recorder{}
	works := brisk()
	works.Channel = "works"
	start(t, newRelay(t, db.Pool, p, works))
	for i := range 10 {
		enqueue(t, db, outbox.Message{Channel: "away", Topic: "t", Key: "k"}, outbox.Message{Channel: "works", Topic: "t", Key: "k", Payload: []byte(fmt.Sprint(i))})
	}
	eventually(t, "the channel that works", func() bool { return len(p.payloads()) == 10 })
	if n := count(t, db, "select count(*) from commitbox.outbox_message where channel = 'away'"); n != 10 {
		t.Errorf("%d messages of the other channel are in hot, want 10", n)
	}
}

func TestBreakerSendsFewMessagesToADestinationThatIsAway(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	var calls, messages atomic.Int32
	var back atomic.Bool
	p := &recorder{}
	cfg := brisk()
	cfg.Lanes, cfg.BackoffBase, cfg.BackoffMax = 4, 400*time.Millisecond, 400*time.Millisecond
	start(t, newRelay(t, db.Pool, publisherFunc(func(ctx context.Context, batch []outbox.Record) []error {
		if back.Load() {
			return p.Publish(ctx, batch)
		}
		calls.Add(1)
		messages.Add(int32(len(batch)))
		errs := make([]error, len(batch))
		for i := range errs {
			errs[i] = outbox.Unavailable(errors.New("connection refused"))
		}
		return errs
	}), cfg))
	for range 10 {
		batch := make([]outbox.Message, 100)
		for i := range batch {
			batch[i] = message("", fmt.Sprint(i))
		}
		enqueue(t, db, batch...)
	}
	eventually(t, "the first call", func() bool { return calls.Load() > 0 })
	time.Sleep(500 * time.Millisecond)
	calls.Store(0)
	messages.Store(0)
	time.Sleep(2 * time.Second)
	if n, m := calls.Load(), messages.Load(); n < 2 || n > 42 || m > 8*n {
		t.Errorf("%d calls with %d messages in 2 s while away; want a trial of at most 8 messages every 50 to 400 ms", n, m)
	}
	back.Store(true)
	eventually(t, "all messages once it is back", func() bool { return len(p.payloads()) == 1000 })
}

func TestH7_ATopicThatAloneIsUnavailableStallsNobody(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &recorder{}
	cfg := brisk()
	cfg.MaxAttempts = 3
	// One at a time, stopping at the first that finds the destination away: the bad topic comes first.
	start(t, newRelay(t, db.Pool, outbox.PublishFunc(func(ctx context.Context, r outbox.Record) error {
		if r.Topic == "bad" {
			return outbox.Unavailable(errors.New("no such exchange"))
		}
		return p.Publish(ctx, []outbox.Record{r})[0]
	}), cfg))
	enqueue(t, db, outbox.Message{Topic: "bad", Key: "a"})
	for i := range 30 {
		enqueue(t, db, message("a", "behind it"), message(fmt.Sprint("k", i), "good"))
	}
	// Others getting through is what shows that the destination is there.
	good := 30
	eventually(t, "the bad topic's message to be dead", func() bool {
		enqueue(t, db, message(fmt.Sprint("k", good), "good"))
		good++
		return count(t, db, "select count(*) from commitbox.outbox_dead") == 1
	})
	eventually(t, "everything else", func() bool { return tables(t, db) == "hot 0, deferred 0, dead 1, blocked 0" })
	if n := len(p.payloads()); n != good+30 {
		t.Errorf("%d messages got through, want %d", n, good+30)
	}
	if n := len(p.payloads("a")); n != 30 {
		t.Errorf("%d messages behind the bad one got through, want 30", n)
	}
}

func TestP8_CommitOrderNeedsNoSerialisation(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	box, err := outbox.New(outbox.Config{CommitOrder: true})
	if err != nil {
		t.Fatal(err)
	}
	p := &recorder{}
	start(t, newRelay(t, db.Pool, p, brisk()))
	var mu sync.Mutex
	var want []string
	var group sync.WaitGroup
	for w := range 6 {
		group.Go(func() {
			for i := range 15 {
				tx, err := db.Pool.Begin(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				payload := fmt.Sprint(w, "-", i)
				if _, err = box.Enqueue(t.Context(), tx, message("hot", payload), message(fmt.Sprint("own", w), "x"), message("", "y")); err != nil {
					t.Error(err)
					return
				}
				time.Sleep(2 * time.Millisecond)
				mu.Lock() // held over COMMIT: the order in which the lock was had is the order of commits
				err = tx.Commit(t.Context())
				want = append(want, payload)
				mu.Unlock()
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	eventually(t, "all messages", func() bool { return len(p.payloads("hot")) == 90 })
	if diff := cmp.Diff(want, p.payloads("hot")); diff != "" {
		t.Errorf("(-committed +published):\n%s", diff)
	}
}

// ordered keeps the order of keys in a batch, as a KeyOrderer has to.
type ordered struct{ recorder }

func (p *ordered) StopsKeyAtFirstFailure() bool { return true }

func (p *ordered) Publish(ctx context.Context, batch []outbox.Record) []error {
	errs := make([]error, len(batch))
	failed := map[string]bool{}
	for i, r := range batch {
		if failed[r.Key] {
			errs[i] = outbox.ErrNotTried
			continue
		}
		errs[i] = p.recorder.Publish(ctx, []outbox.Record{r})[0]
		failed[r.Key] = errs[i] != nil
	}
	return errs
}

func TestAPublisherThatKeepsOrderGetsWholeBatches(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	p := &ordered{}
	var largest atomic.Int32
	p.fail = failing(errRefused, 1, "20")
	var want []string
	for i := range 100 {
		enqueue(t, db, message("k", fmt.Sprint(i)))
		want = append(want, fmt.Sprint(i))
	}
	start(t, newRelay(t, db.Pool, &watched{p, &largest}, brisk()))
	eventually(t, "100 messages", func() bool { return len(p.payloads()) == 100 })
	if diff := cmp.Diff(want, p.payloads()); diff != "" {
		t.Error(diff)
	}
	if largest.Load() < 10 {
		t.Errorf("the largest batch of one key had %d messages", largest.Load())
	}
}

type watched struct {
	*ordered
	largest *atomic.Int32
}

func (w *watched) Publish(ctx context.Context, batch []outbox.Record) []error {
	if n := int32(len(batch)); n > w.largest.Load() {
		w.largest.Store(n)
	}
	return w.ordered.Publish(ctx, batch)
}
