package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The test binary is the program itself when this variable is set.
const selfVariable = "DEVSERVICES_TEST_SELF"

func TestMain(m *testing.M) {
	if os.Getenv(selfVariable) != "" {
		main()
	}
	os.Exit(m.Run())
}

// program prepares a call of devservices in a repository of its own, without
// addresses in the environment.
func program(t *testing.T, root string, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self, args...)
	cmd.Dir = root
	for _, assignment := range os.Environ() {
		name, _, _ := strings.Cut(assignment, "=")
		if !slices.Contains([]string{"DATABASE_URL", "REDIS_URL", "AMQP_URL", "RABBITMQ_URL"}, name) && !strings.HasPrefix(name, "COMMITBOX_") {
			cmd.Env = append(cmd.Env, assignment)
		}
	}
	cmd.Env = append(cmd.Env, selfVariable+"=1")
	return cmd
}

// repository makes what devservices takes for its repository.
func repository(t *testing.T) string {
	t.Helper()
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(root, "tools", "devservices"), 0o755); err != nil {
		t.Fatal(err)
	}
	return root
}

// result runs a command to its end.
func result(t *testing.T, cmd *exec.Cmd) (status int, stdout, stderr string) {
	t.Helper()
	var out, failure bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &failure
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), failure.String()
}

func TestRunExportsAddressesAndExitsWithTheStatus(t *testing.T) {
	t.Parallel()
	cmd := program(t, repository(t), "run", "--with", "pgbouncer,redis", "--", "sh", "-c", "env; exit 7")
	status, out, failure := result(t, cmd)
	if status != 7 {
		t.Errorf("status %d, want 7: %s", status, failure)
	}
	for _, pattern := range []string{
		`(?m)^COMMITBOX_TEST_POSTGRES=postgres://postgres@127\.0\.0\.1:\d+/postgres\?sslmode=disable$`,
		`(?m)^COMMITBOX_TEST_PGBOUNCER=postgres://postgres@127\.0\.0\.1:\d+/postgres\?sslmode=disable$`,
		`(?m)^COMMITBOX_TEST_REDIS=redis://127\.0\.0\.1:\d+/0$`,
		`(?m)^COMMITBOX_PG_BIN=/.+$`,
	} {
		if !regexp.MustCompile(pattern).MatchString(out) {
			t.Errorf("no line matches %s in\n%s", pattern, out)
		}
	}
	if strings.Contains(out, "COMMITBOX_TEST_RABBITMQ") {
		t.Error("a service was started that was not asked for")
	}
}

func TestRunTakesGivenAddresses(t *testing.T) {
	t.Parallel()
	cmd := program(t, repository(t), "run", "--with", "redis,rabbitmq", "--", "sh", "-c", "echo $COMMITBOX_TEST_REDIS $COMMITBOX_TEST_RABBITMQ")
	cmd.Env = append(cmd.Env, "REDIS_URL=redis://given", "COMMITBOX_TEST_REDIS=redis://wins", "AMQP_URL=amqp://given")
	if status, out, failure := result(t, cmd); status != 0 || out != "redis://wins amqp://given\n" {
		t.Errorf("status %d, output %q, %s", status, out, failure)
	}
}

func TestRunInTheToolsFolderMeansTheRoot(t *testing.T) {
	t.Parallel()
	root := repository(t)
	for dir, want := range map[string]string{root: root, filepath.Join(root, "tools"): root, filepath.Join(root, "tools", "devservices"): filepath.Join(root, "tools", "devservices")} {
		cmd := program(t, dir, "run", "--with", "redis", "--", "pwd")
		cmd.Env = append(cmd.Env, "REDIS_URL=redis://given")
		if _, out, failure := result(t, cmd); out != want+"\n" {
			t.Errorf("in %s the command runs in %q, want %s: %s", dir, out, want, failure)
		}
	}
}

func TestSignalStopsCommandAndServices(t *testing.T) {
	t.Parallel()
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(sig.String(), func(t *testing.T) {
			t.Parallel()
			cmd := program(t, repository(t), "run", "--with", "redis", "--", "sh", "-c", "echo $COMMITBOX_TEST_REDIS; exec sleep 300")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			line := make([]byte, 200)
			n, err := out.Read(line)
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Process.Signal(sig); err != nil {
				t.Fatal(err)
			}
			_ = cmd.Wait() // the status is looked at below
			if got, want := cmd.ProcessState.ExitCode(), 128+int(syscall.SIGTERM); got != want {
				t.Errorf("status %d, want %d", got, want)
			}
			mustBeGone(t, strings.TrimSpace(string(line[:n])))
		})
	}
}

// mustBeGone fails if a redis answers at the address.
func mustBeGone(t *testing.T, address string) {
	t.Helper()
	if reachable(t, address) {
		t.Errorf("%s still answers", address)
	}
}

func TestUpStatusDown(t *testing.T) {
	t.Parallel()
	root := repository(t)
	call := func(args ...string) (int, string) {
		status, out, failure := result(t, program(t, root, args...))
		return status, out + failure
	}
	t.Cleanup(func() { call("down") })
	if status, out := call("status"); status == 0 {
		t.Errorf("status before up succeeds: %s", out)
	}
	status, first := call("up", "--with", "redis")
	if status != 0 {
		t.Fatalf("up: %s", first)
	}
	address := regexp.MustCompile(`redis://[^']+`).FindString(first)
	if !reachable(t, address) {
		t.Fatalf("no redis at %q", address)
	}
	for _, name := range []string{"up", "status"} {
		if status, out := call(name, "--with", "redis"); status != 0 || out != first {
			t.Errorf("%s: status %d, %q, want %q", name, status, out, first)
		}
	}
	if status, out := call("down"); status != 0 || out != "" {
		t.Errorf("down: status %d, %s", status, out)
	}
	mustBeGone(t, address)
	if status, out := call("status"); status == 0 {
		t.Errorf("status after down succeeds: %s", out)
	}
	if status, out := call("down"); status != 0 {
		t.Errorf("down when nothing runs: %s", out)
	}
}

func TestStateOfADeadBackgroundProcessIsForgotten(t *testing.T) {
	t.Parallel()
	root := repository(t)
	if _, err := buildDir(root, stateFile); err != nil {
		t.Fatal(err)
	}
	// The pid is this test's: down must not signal it.
	if err := writeState(root, state{Pid: os.Getpid(), Environment: environment{"A": "b"}}); err != nil {
		t.Fatal(err)
	}
	if status, _, failure := result(t, program(t, root, "down")); status != 0 {
		t.Fatal(failure)
	}
	if s, err := currentState(root); s != nil || err != nil {
		t.Errorf("the state is still there: %v, %v", s, err)
	}
}

func TestBadArguments(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{},
		{"start"},
		{"run"},
		{"run", "--with", "kafka", "--", "true"},
		{"run", "--postgres", "13", "--", "true"},
	} {
		if status, _, failure := result(t, program(t, repository(t), args...)); status != 2 || failure == "" {
			t.Errorf("%v: status %d, message %q; want 2 and a message", args, status, failure)
		}
	}
}

func TestMissingProgramsNameTheChoices(t *testing.T) {
	t.Parallel()
	s, err := selectServices([]string{"redis"})
	if err != nil {
		t.Fatal(err)
	}
	got := s[0].choices(errors.New("reason")).Error()
	for _, text := range []string{"reason", "COMMITBOX_TEST_REDIS=", "redis-server", "Docker", "apt-get"} {
		if !strings.Contains(got, text) {
			t.Errorf("the message lacks %q: %s", text, got)
		}
	}
}

func TestDockerAnswersInTime(t *testing.T) {
	for host, want := range map[string]bool{
		"unix:///nonexistent/docker.sock": false,
		"tcp://" + silentServer(t):        false,
		"tcp://" + pingServer(t):          true,
	} {
		t.Setenv("DOCKER_HOST", host)
		begin := time.Now()
		if got := dockerAnswers(t.Context()); got != want {
			t.Errorf("%s answers: %v, want %v", host, got, want)
		}
		if took := time.Since(begin); took > 10*time.Second {
			t.Errorf("%s: looking took %v", host, took)
		}
	}
}
