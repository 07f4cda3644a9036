package devserver_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/commitbox/commitbox/internal/devserver"
)

// A test that needs a starter to die runs its own binary again with this
// variable set; TestStarter then starts servers and waits to be killed.
const starterVariable = "COMMITBOX_TEST_STARTER"

// started is what the starter says about a server.
type started struct {
	Pid int
	Dir string
}

func TestStarter(t *testing.T) {
	if os.Getenv(starterVariable) == "" {
		t.Log("only of use to the tests that run it in a process of its own")
		return
	}
	ctx := context.Background()
	postgres, err := devserver.StartPostgres(ctx, devserver.PostgresOptions{})
	must(t, err)
	bouncer, err := devserver.StartPgBouncer(ctx, devserver.PgBouncerOptions{Target: postgres.URL()})
	must(t, err)
	redis, err := devserver.StartRedis(ctx, devserver.RedisOptions{})
	must(t, err)
	rabbit, err := devserver.StartRabbitMQ(ctx, devserver.RabbitMQOptions{})
	must(t, err)
	must(t, redis.Pause()) // a stopped process must go, too

	var all []started
	for _, s := range []*devserver.Server{postgres, bouncer, redis, rabbit} {
		all = append(all, started{s.Pid(), s.Dir()})
	}
	must(t, json.NewEncoder(os.Stdout).Encode(all))
	<-ctx.Done()
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ownTempDir keeps the sweeps of other processes away from this test. Unlike
// t.TempDir, every account may enter the folder.
func ownTempDir(t *testing.T) {
	t.Helper()
	dir, err := os.MkdirTemp("", "sweep-")
	must(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o755))
	t.Setenv("TMPDIR", dir)
}

// killStarter runs TestStarter and kills it when all its servers run.
func killStarter(t *testing.T) []started {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestStarter$")
	cmd.Env = append(os.Environ(), starterVariable+"=1")
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	must(t, errors.Join(err, cmd.Process.Kill()))
	_ = cmd.Wait() // "signal: killed"
	var all []started
	if err := json.Unmarshal([]byte(line), &all); err != nil {
		t.Fatalf("%v: %s", err, line)
	}
	t.Cleanup(func() { // ends what should not be there when the test fails
		for _, s := range all {
			for _, pid := range inhabitants(s.Dir) {
				_ = syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	return all
}

func TestNothingSurvivesAKilledStarter(t *testing.T) {
	ownTempDir(t)
	all := killStarter(t)
	for _, s := range all {
		waitUntil(t, fmt.Sprintf("process %d of %s ends", s.Pid, s.Dir), func() bool { return !processExists(s.Pid) })
		waitUntil(t, "nothing lives in "+s.Dir, func() bool { return len(inhabitants(s.Dir)) == 0 })
	}
	startRedis(t) // sweeps
	for _, s := range all {
		if _, err := os.Stat(s.Dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the next start left the stale folder %s", s.Dir)
		}
	}
}

// inhabitants finds the processes that work in a folder, the port mapper among
// them.
func inhabitants(dir string) (pids []int) {
	links, _ := filepath.Glob("/proc/[0-9]*/cwd")
	for _, link := range links {
		cwd, err := os.Readlink(link)
		if err != nil || !strings.HasPrefix(cwd, dir) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(link))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

func waitUntil(t *testing.T, what string, done func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !done() {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// deadPid returns the pid of a process that has ended.
func deadPid(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("true")
	must(t, cmd.Run())
	return cmd.Process.Pid
}

// staleFolder makes a folder as a dead starter leaves it.
func staleFolder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", fmt.Sprintf("commitbox-%d-1-redis-", deadPid(t)))
	must(t, err)
	return dir
}

// sleeper starts a process in a folder and ends it with the test.
func sleeper(t *testing.T, dir string) (pid int, ended chan struct{}) {
	t.Helper()
	cmd := exec.Command("sleep", "300")
	cmd.Dir = dir
	must(t, cmd.Start())
	ended = make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
	})
	return cmd.Process.Pid, ended
}

func TestSweepEndsOnlyWhatLivesInTheFolder(t *testing.T) {
	ownTempDir(t)
	stranger, strangerEnded := sleeper(t, t.TempDir())
	dir := staleFolder(t)
	leftover, leftoverEnded := sleeper(t, dir)
	must(t, os.WriteFile(filepath.Join(dir, "pids"), fmt.Appendf(nil, "%d\n%d\n", stranger, leftover), 0o600))

	startRedis(t)
	select {
	case <-leftoverEnded:
	case <-time.After(30 * time.Second):
		t.Error("the leftover process still runs")
	}
	select {
	case <-strangerEnded:
		t.Error("a process that does not live in the folder was ended because its pid is listed")
	default:
	}
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Error("the stale folder is still there")
	}
}

func TestSweepLeavesFoldersOfLivingOwnersAndOthers(t *testing.T) {
	ownTempDir(t)
	living := startRedis(t)
	other, err := os.MkdirTemp("", "commitbox-notes-")
	must(t, err)
	startRedis(t)
	for _, dir := range []string{living.Dir(), other} {
		if _, err := os.Stat(dir); err != nil {
			t.Errorf("the sweep took %s: %v", dir, err)
		}
	}
}
