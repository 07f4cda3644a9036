package inbox_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// ancient is a server of this test's own that can be put back to an earlier moment, while Redis is kept.
type ancient struct {
	*guardedWorld
	server *devserver.Server
}

func newAncient(t *testing.T) *ancient {
	t.Helper()
	t.Parallel()
	server := testenv.PrivatePostgres(t, devserver.PostgresOptions{})
	pool, err := pgxpool.New(t.Context(), server.URL())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	if err := migrate.Up(t.Context(), pool, migrate.Config{}); err != nil {
		t.Fatal(err)
	}
	w := &world{&testenv.DB{URL: server.URL(), Pool: pool}, t}
	w.exec(`create table effect (id text, note text)`)
	return &ancient{guard(w, newFront(t, testenv.Redis(t)), inbox.ModeDouble), server}
}

func (a *ancient) data() string { return filepath.Join(a.server.Dir(), "data") }
func (a *ancient) copy() string { return filepath.Join(a.server.Dir(), "copy") }

// replace stops the server as a crash would, changes its files, and starts it again.
func (a *ancient) replace(change func()) {
	a.t.Helper()
	if err := a.server.Kill(); err != nil {
		a.t.Fatal(err)
	}
	change()
	if err := a.server.Restart(context.Background()); err != nil {
		a.t.Fatal(err)
	}
	a.Pool.Reset()
	a.within(patience, "the database answers", func() bool { return a.Pool.Ping(context.Background()) == nil })
}

func (a *ancient) run(name string, args ...string) {
	a.t.Helper()
	if out, err := exec.CommandContext(context.Background(), name, args...).CombinedOutput(); err != nil {
		a.t.Fatalf("%s: %v: %s", name, err, out)
	}
}

// snapshot copies the data folder, as a copy of the volume would be.
func (a *ancient) snapshot() {
	a.t.Helper()
	a.exec(`checkpoint`)
	a.replace(func() { a.run("cp", "-a", a.data(), a.copy()) })
}

// restore puts the copy back, after change has been done to it.
func (a *ancient) restore(change func()) {
	a.t.Helper()
	a.replace(func() {
		a.run("rm", "-r", a.data())
		a.run("mv", a.copy(), a.data())
		change()
	})
}

// file writes a file of the server's.
func (a *ancient) file(name, text string) {
	a.t.Helper()
	info, err := os.Stat(a.data())
	if err != nil {
		a.t.Fatal(err)
	}
	path := filepath.Join(a.data(), name)
	f, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		a.t.Fatal(err)
	}
	if _, err := f.WriteString(text); err != nil {
		a.t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		a.t.Fatal(err)
	}
	owner := info.Sys().(*syscall.Stat_t)
	if err := os.Chown(path, int(owner.Uid), int(owner.Gid)); err != nil {
		a.t.Fatal(err)
	}
}

// byRow is a message of a consumer that has no policy of its own: its mode is postgres.
func byRow(message string) inbox.Message {
	return inbox.Message{ID: inbox.ID{Consumer: "p", Message: message}}
}

// other is the box of a process that starts now.
func (a *ancient) other() (*inbox.Box, *inbox.Policies) {
	p := a.world.policies(nil)
	return a.world.box(inbox.Config{Policies: p, Cache: a.front, Guard: a.front}), p
}

// A recovery to an earlier moment begins another time line: copies of rows that it lost are no answers, for anybody.
func TestF8_P12_ARecoveryToAnEarlierTimeMakesEveryCopyAMiss(t *testing.T) {
	a := newAncient(t)
	a.want("kept", a.process(a.box, "kept"), "executed by table")
	a.snapshot()
	a.want("lost", a.process(a.box, "lost"), "executed by table")
	a.want("lost, again", a.process(a.box, "lost"), "replayed by cache")
	a.want("lost in mode postgres", a.deliver(a.box, byRow("lost")), "executed by table")
	a.restore(func() {
		a.file("postgresql.auto.conf", "restore_command = 'false'\n")
		a.file("recovery.signal", "")
	})
	a.within(patience, "the recovery has ended", func() bool { return !one[bool](a.world, `select pg_is_in_recovery()`) })
	a.wantEffects(id("lost"), 0)
	a.load(a.policies)
	fresh, _ := a.other()
	a.want("lost with its effect", a.process(fresh, "lost"), "executed by table")
	a.want("by a process that was there before", a.process(a.box, "lost"), "replayed by cache")
	a.want("kept", a.process(a.box, "kept"), "replayed by table")
	a.want("lost in mode postgres", a.deliver(a.box, byRow("lost")), "executed by table")
	a.wantEffects(byRow("lost").ID, 1)
	a.wantEffects(id("lost"), 1)
	a.wantEffects(id("kept"), 1)
}

// A database that is started from a copy of its files has the same identity. A process that has seen more of the log
// notices it; for the others the runbook rotates the generation.
func TestF8_P12_ACopyOfTheFilesIsNoticedOrRotated(t *testing.T) {
	a := newAncient(t)
	a.process(a.box, "before")
	a.snapshot()
	for _, message := range []string{"noticed", "rotated"} {
		a.process(a.box, message)
		a.want(message, a.process(a.box, message), "replayed by cache")
	}
	a.want("lost in mode postgres", a.deliver(a.box, byRow("lost")), "executed by table")
	a.exec(`select pg_switch_wal()`)
	a.load(a.policies) // learns how far the log is
	a.restore(func() {})
	if err := a.policies.Load(t.Context()); err == nil {
		t.Error("a log that is behind is no problem")
	}
	a.want("lost in mode postgres", a.deliver(a.box, byRow("lost")), "executed by table")
	a.wantEffects(byRow("lost").ID, 1)
	a.want("what the process saw itself", a.process(a.box, "noticed"), "executed by table")
	a.want("and nothing is cached until the rotation", a.process(a.box, "noticed"), "replayed by table")
	fresh, learned := a.other()
	if _, err := learned.RotateCache(t.Context(), "restored"); err != nil {
		t.Fatal(err)
	}
	a.load(learned)
	a.load(a.policies)
	a.want("after the rotation", a.process(fresh, "rotated"), "executed by table")
	a.want("and cached again", a.process(a.box, "rotated"), "replayed by cache")
	for _, message := range []string{"noticed", "rotated"} {
		a.wantEffects(id(message), 1)
	}
}

// Without the database, what is cached is an answer for some seconds and no longer: it may have been restored meanwhile.
func TestF8_CopiesAreNotTrustedForLongWithoutTheDatabase(t *testing.T) {
	if os.Getenv("COMMITBOX_SOAK") == "" {
		t.Skip("takes 16 seconds; COMMITBOX_SOAK=1")
	}
	g := newGuarded(t, inbox.ModeDouble)
	g.process(g.box, "m")
	g.want("fresh", g.process(g.box, "m"), "replayed by cache")
	time.Sleep(16 * time.Second)
	g.want("stale", g.process(g.box, "m"), "replayed by table")
	g.load(g.policies)
	g.want("fresh again", g.process(g.box, "m"), "replayed by cache")
}
