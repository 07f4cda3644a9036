package outbox

import (
	"testing"
	"time"

	"github.com/google/uuid"
)

// A shard is given back only when every lane works without it.
func TestA8_SurplusIsGivenBackAfterTheLanesHaveDrained(t *testing.T) {
	s := newMemory(time.Hour)
	ctx := t.Context()
	owner := uuid.New()
	must(t, s.join(ctx, owner))
	r := newRoster(RelayConfig{Lanes: 2}.withDefaults(), s, owner)
	defer r.close()
	must(t, r.look(ctx))
	adopt := func(lane int) {
		a, _ := r.assigned()
		r.adopt(lane, a.version)
	}
	adopt(0)
	adopt(1)
	time.Sleep(time.Millisecond)
	must(t, s.join(ctx, uuid.New()))
	must(t, r.look(ctx))
	if a, _ := r.assigned(); len(a.held) != 32 {
		t.Fatalf("%d shards assigned beside a second relay, want 32", len(a.held))
	}
	held := func() int {
		around, err := s.look(ctx, owner)
		must(t, err)
		return len(around.held)
	}
	adopt(0)
	must(t, r.look(ctx))
	if n := held(); n != 64 {
		t.Fatalf("%d shards held while a lane may still work on the others, want 64", n)
	}
	adopt(1)
	must(t, r.look(ctx))
	if n := held(); n != 32 {
		t.Errorf("%d shards held once both lanes have drained, want 32", n)
	}
}

// Another server may answer after a connection has failed: floors are void.
func TestA1_ALostConnectionVoidsTheFloors(t *testing.T) {
	s := newMemory(time.Hour)
	g := newGate(RelayConfig{}.withDefaults(), s)
	must(t, g.look(t.Context(), time.Now()))
	before, _ := g.view()
	g.lost()
	if after, _ := g.view(); after.generation == before.generation || after.resolved != 0 {
		t.Errorf("after the loss: %+v, before: %+v", after, before)
	}
	must(t, g.look(t.Context(), time.Now()))
	before, _ = g.view()
	s.start = s.start.Add(time.Second)
	must(t, g.look(t.Context(), time.Now().Add(2*time.Second)))
	if after, _ := g.view(); after.generation == before.generation {
		t.Error("a restarted server left the floors as they were")
	}
}
