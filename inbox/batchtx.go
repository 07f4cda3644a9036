package inbox

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// shared is one transaction for several messages.
type shared struct {
	box      *Box
	consumer string
	claimed  []int // positions in the claim
	ended    bool  // the handler ended the transaction
}

// run claims, runs and commits. Its error says that nothing is committed, or that it is not known.
func (s *shared) run(ctx context.Context, claim db.InboxClaimBatchParams, fn func(context.Context, pgx.Tx, []int) ([][]byte, error)) error {
	conn, err := s.box.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	defer rollback(ctx, conn.Conn())
	var tx pgx.Tx
	ours, err := db.New(s.box.schema.On(pipe{on: conn.Conn(), begin: &tx})).InboxClaimBatch(ctx, claim)
	if err != nil {
		return err
	}
	for n, id := range claim.MessageIds { // both in one order
		if len(ours) > 0 && ours[0] == id {
			s.claimed, ours = append(s.claimed, n), ours[1:]
		}
	}
	if len(s.claimed) == 0 {
		return nil
	}
	owned := &ownedTx{tx: tx}
	defer owned.ended.Store(true)
	var results [][]byte
	_, err = recovered(func() (_ []byte, err error) {
		ctx, leave := s.box.enter(ctx, s.ids(claim), conn.Conn(), s.box.pool)
		defer leave()
		results, err = fn(ctx, owned, s.claimed)
		return nil, err
	})
	owned.ended.Store(true)
	if s.ended = stateOf(conn.Conn()) == stateIdle; s.ended {
		return errors.Join(ErrTxEnded, err)
	}
	if stateOf(conn.Conn()) == stateBusy {
		s.abandon(ctx, conn, s.ids(claim))
		return errors.Join(errRowsOpen, err)
	}
	if err != nil {
		return err
	}
	return s.commit(ctx, conn, pick(claim.MessageIds, s.claimed), results)
}

// abandon ends a connection on which the handler left rows open, and waits until PostgreSQL has dropped its locks, which it
// does one after the other: until then they keep the messages from running alone.
func (s *shared) abandon(ctx context.Context, conn *pgxpool.Conn, ids []ID) {
	ctx, cancel := detached(ctx)
	defer cancel()
	_ = conn.Conn().Close(ctx)
	conn.Release() // what waits takes a connection of its own
	for _, id := range ids {
		_ = s.box.guarded(ctx, id, func(p pipe) error {
			_, err := s.box.look(ctx, p, id)
			return err
		})
	}
}

// ids returns the claimed ones.
func (s *shared) ids(claim db.InboxClaimBatchParams) []ID {
	ids := make([]ID, len(s.claimed))
	for n, at := range s.claimed {
		ids[n] = ID{Consumer: s.consumer, Message: claim.MessageIds[at]}
	}
	return ids
}

var errNotCommitted = errors.New("the batch was not committed")

// commit stores the results and commits, in one round trip. PostgreSQL answers ROLLBACK where the handler had swallowed
// the failure of a statement; open rows keep it from being sent.
func (s *shared) commit(ctx context.Context, conn *pgxpool.Conn, ids []string, results [][]byte) error {
	ctx, cancel := detached(ctx)
	defer cancel()
	tag, err := s.sendCommit(ctx, conn.Conn(), ids, results)
	if err == nil && tag.String() != "COMMIT" {
		return errNotCommitted
	}
	return err
}

func (s *shared) sendCommit(ctx context.Context, conn *pgx.Conn, ids []string, results [][]byte) (tag pgconn.CommandTag, err error) {
	if len(results) == 0 {
		return conn.Exec(ctx, schema.Commit)
	}
	p := pipe{on: conn, after: schema.Commit, tag: &tag}
	err = db.New(s.box.schema.On(p)).InboxStoreResults(ctx, db.InboxStoreResultsParams{Consumer: s.consumer, MessageIds: ids, Results: results})
	return tag, err
}
