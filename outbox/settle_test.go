package outbox

import (
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/internal/testenv"
)

// settled is a store whose key a is blocked behind a1, with what is to be settled: a message that was sent, and two followers.
type settled struct {
	contractStore
	owner           uuid.UUID
	epochs          map[int16]int64
	key             keyRef
	sent, followers []found
}

func toSettle(t *testing.T, s contractStore) settled {
	t.Helper()
	x := settled{contractStore: s, owner: s.owner(t)}
	s.put(t, "a", "a1", "a2", "a3")
	s.put(t, "", "sent")
	x.epochs = epochsOf(s.look(t, x.owner))
	for _, r := range s.poll(t, 10, 1<<20, 0) {
		f := found{r.ref, r.ID, r.place}
		switch string(r.Payload) {
		case "sent":
			x.sent = append(x.sent, f)
		case "a1":
			x.key = r.keyRef()
			_, err := s.link.apply(t.Context(), x.owner, x.epochs, change{block: []blocked{{x.key, 0}}, deferred: []failure{{ref: r.ref, attempts: 1, text: "x"}}})
			must(t, err)
		default:
			x.followers = append(x.followers, f)
		}
	}
	return x
}

func (x settled) settle(t *testing.T) ([]int16, error) {
	return x.link.settle(t.Context(), x.owner, x.epochs, x.sent, false, x.followers)
}

func TestSettleInEveryMode(t *testing.T) {
	t.Parallel()
	eachMode(t, func(t *testing.T, _ *testenv.DB, s contractStore) {
		x := toSettle(t, s)
		lost, err := x.settle(t)
		must(t, err)
		expect(t, "lost", 0, len(lost))
		expect(t, "hot", []string{}, texts(s.poll(t, 10, 1<<20, 0)))
		expect(t, "deferred", []string{"a1", "a2", "a3"}, s.due(t))
	})
}

// Where the channel keeps what it sent, so does a round that moves followers.
func TestSettleKeepsWhatWasSent(t *testing.T) {
	t.Parallel()
	db, s := newPostgresStore(t, time.Hour)
	must(t, s.sentDays(t.Context()))
	x := toSettle(t, s)
	_, err := x.link.settle(t.Context(), x.owner, x.epochs, x.sent, true, x.followers)
	must(t, err)
	var kept, hot int
	must(t, db.Pool.QueryRow(t.Context(), "select (select count(*) from commitbox.outbox_sent where payload = 'sent'), (select count(*) from commitbox.outbox_message)").Scan(&kept, &hot))
	expect(t, "kept", 1, kept)
	expect(t, "hot", 0, hot)
}

// The statement that moves followers waits for whoever holds the shard, and then sees what he did: who lost the shard, or
// whose key was touched, moves nothing. That a message was confirmed is true nevertheless.
func TestP7_FollowersStayWhereTheyAreIfTheShardWasLostMeanwhile(t *testing.T) {
	t.Parallel()
	for what, sql := range map[string]string{
		"another owner":         "update commitbox.outbox_shard set owner = gen_random_uuid() where channel = 'default' and shard = $1",
		"another epoch":         "update commitbox.outbox_shard set epoch = nextval('commitbox.outbox_epoch') where channel = 'default' and shard = $1",
		"the operator's retry":  "select commitbox.outbox_retry('default', 'a') where $1 >= 0",
		"the operator parks it": "select commitbox.outbox_park('default', 'a') where $1 >= 0",
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			db, s := newPostgresStore(t, time.Hour)
			x := toSettle(t, s)
			tx, err := db.Pool.Begin(t.Context())
			must(t, err)
			_, err = tx.Exec(t.Context(), sql, x.key.shard)
			must(t, err)
			type answer struct {
				lost []int16
				err  error
			}
			done := make(chan answer, 1)
			go func() {
				lost, err := x.settle(t)
				done <- answer{lost, err}
			}()
			select {
			case a := <-done:
				t.Fatalf("it did not wait for the shard: %+v", a)
			case <-time.After(300 * time.Millisecond):
			}
			must(t, tx.Commit(t.Context()))
			a := <-done
			must(t, a.err)
			expect(t, "lost", []int16{x.key.shard}, a.lost)
			expect(t, "hot", []string{"a2", "a3"}, texts(s.poll(t, 10, 1<<20, 0)))
		})
	}
}

// Where a key was freed under the epoch that is still valid, nothing is moved and nothing deleted; the confirmed message is
// the lane's to delete again.
func TestSettleBehindAFreedKeyChangesNothing(t *testing.T) {
	t.Parallel()
	db, s := newPostgresStore(t, time.Hour)
	x := toSettle(t, s)
	_, err := db.Pool.Exec(t.Context(), "delete from commitbox.outbox_deferred")
	must(t, err)
	_, err = db.Pool.Exec(t.Context(), "delete from commitbox.outbox_blocked")
	must(t, err)
	_, err = x.settle(t)
	if pg := (*pgconn.PgError)(nil); !errors.As(err, &pg) || pg.Code != "23503" {
		t.Fatalf("a follower without its key's row: %v", err)
	}
	expect(t, "hot after the refusal", 3, len(s.poll(t, 10, 1<<20, 0)))
	must(t, x.link.confirm(t.Context(), x.sent, false)) // over the same connection: its transaction has ended
	expect(t, "hot", []string{"a2", "a3"}, texts(s.poll(t, 10, 1<<20, 0)))
}

// Followers are found by what they are, not by where they lay alone: another message may lie there by now. And a shard that
// is not among those of the followers, or whose followers are another channel's, is none of theirs.
func TestSettleMovesNothingElse(t *testing.T) {
	t.Parallel()
	db, s := newPostgresStore(t, time.Hour)
	x := toSettle(t, s)
	s.put(t, "a", "a4")
	s.put(t, "b", "b1")
	for _, r := range s.poll(t, 10, 1<<20, 0) {
		switch string(r.Payload) {
		case "a4": // where a3 is believed to be
			x.followers[1].place = r.place
		case "b1":
			wrong := found{r.ref, uuid.New(), r.place}
			wrong.shard = x.key.shard
			x.followers = append(x.followers, wrong)
		}
	}
	_, err := x.settle(t)
	must(t, err)
	expect(t, "deferred", []string{"a1", "a2", "a3"}, s.due(t))
	var n int
	must(t, db.Pool.QueryRow(t.Context(), "select count(*) from commitbox.outbox_message").Scan(&n))
	expect(t, "messages in hot, a4 and b1", 2, n)
}
