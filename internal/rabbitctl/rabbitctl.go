// Package rabbitctl runs rabbitmqctl against a RabbitMQ node that a test
// started with testenv.PrivateRabbitMQ: for alarms, policies and cluster state,
// which no client connection can change. It needs Linux.
package rabbitctl

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/commitbox/commitbox/internal/devserver"
)

// The wrapper in the path of Debian changes the user; the script behind it
// does not.
const debianScript = "/usr/lib/rabbitmq/bin/rabbitmqctl"

const timeout = time.Minute

// Run executes a command of rabbitmqctl on the node and returns its output.
func Run(t testing.TB, node *devserver.Server, args ...string) string {
	t.Helper()
	script := debianScript
	if _, err := os.Stat(script); err != nil {
		script = "rabbitmqctl"
	}
	cookie, err := os.ReadFile(filepath.Join(node.Dir(), ".erlang.cookie"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, script, append([]string{"--quiet", "--erlang-cookie", string(cookie)}, args...)...)
	cmd.Env = append(environment(t, node.Pid()), "HOME="+t.TempDir())
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("rabbitmqctl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// Name is the node's name in its cluster.
func Name(t testing.TB, node *devserver.Server) string {
	t.Helper()
	for _, variable := range environment(t, node.Pid()) {
		if name, found := bytes.CutPrefix([]byte(variable), []byte("RABBITMQ_NODENAME=")); found {
			return string(name)
		}
	}
	t.Fatal("the node runs without RABBITMQ_NODENAME")
	return ""
}

// environment is what a process was started with: the node's name and the
// place of its port mapper are in it.
func environment(t testing.TB, pid int) []string {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for variable := range bytes.SplitSeq(bytes.Trim(raw, "\x00"), []byte{0}) {
		all = append(all, string(variable))
	}
	return all
}
