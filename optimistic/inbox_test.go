package optimistic_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/optimistic"
)

// With the inbox in front, a repeated command gets the answer of its first run, also when others have changed the row
// since, and a stale one gets a conflict, as often as it comes.
func TestA6_ARepeatGetsTheOldAnswerAndAStaleCommandAConflict(t *testing.T) {
	w := newWorld(t)
	first := command{ID: "c1", Account: "a", Version: 7, Owner: "Eve"}
	stale := command{ID: "c2", Account: "a", Version: 7, Owner: "Mallory"}
	later := command{ID: "c3", Account: "a", Version: 8, Owner: "Grace"}
	for _, step := range []struct {
		command  command
		version  int64
		replayed bool
		err      error
	}{
		{first, 8, false, nil},
		{first, 8, true, nil},
		{stale, 0, false, optimistic.ErrConflict},
		{stale, 0, false, optimistic.ErrConflict},
		{later, 9, false, nil},
		{first, 8, true, nil},
		{later, 9, true, nil},
	} {
		res, err := execute(t.Context(), w.Pool, step.command)
		if !errors.Is(err, step.err) || res.Value != step.version || res.Replayed != step.replayed {
			t.Errorf("%s: version %d, replayed %v, %v; want %d, %v, %v", step.command.ID, res.Value, res.Replayed, err, step.version, step.replayed, step.err)
		}
	}
	w.wantAccount("a", "Grace", 9)
	if n := one[int](w, `select count(*)::int from commitbox.inbox`); n != 2 {
		t.Errorf("%d commands are recorded, want 2: a conflict leaves nothing", n)
	}
}

// Copies of many commands for one version at once: one command wins, and all its copies hear of one version.
func TestA6_OfManyCommandsOneWins(t *testing.T) {
	w := newWorld(t)
	var applied, conflicts atomic.Int64
	var group sync.WaitGroup
	for i := range writers {
		c := command{ID: string(rune('A' + i%10)), Account: "a", Version: 7, Owner: "Eve"} // ten commands, five copies each
		group.Go(func() {
			for {
				res, err := execute(t.Context(), w.Pool, c)
				switch {
				case errors.Is(err, inbox.ErrInProgress):
					continue // a copy of it is running
				case errors.Is(err, optimistic.ErrConflict):
					conflicts.Add(1)
				case err != nil || res.Value != 8:
					t.Errorf("version %d, %v", res.Value, err)
				default:
					applied.Add(1)
				}
				return
			}
		})
	}
	group.Wait()
	if applied.Load() != 5 || conflicts.Load() != writers-5 {
		t.Errorf("%d are applied or replayed and %d are in conflict, want 5 and %d", applied.Load(), conflicts.Load(), writers-5)
	}
	w.wantAccount("a", "Eve", 8)
}
