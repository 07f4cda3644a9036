package devserver_test

import (
	"bufio"
	"net"
	"net/url"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/internal/devserver"
)

func startRedis(t *testing.T, args ...string) *devserver.Server {
	t.Helper()
	s, err := devserver.StartRedis(t.Context(), devserver.RedisOptions{Args: args})
	return stopAfter(t, s, err)
}

// ask sends one inline command and returns the first line of the answer.
func ask(t *testing.T, address, command string) string {
	t.Helper()
	u, err := url.Parse(address)
	must(t, err)
	conn, err := net.Dial("tcp", u.Host)
	must(t, err)
	defer conn.Close()
	_, err = conn.Write([]byte(command + "\r\n"))
	must(t, err)
	answer, err := bufio.NewReader(conn).ReadString('\n')
	must(t, err)
	return strings.TrimSpace(answer)
}

func TestRedisForgetsWithARestart(t *testing.T) {
	t.Parallel()
	s := startRedis(t)
	if got := ask(t, s.URL(), "SET a 1"); got != "+OK" {
		t.Fatalf("SET answered %q", got)
	}
	must(t, s.Restart(t.Context()))
	if got := ask(t, s.URL(), "EXISTS a"); got != ":0" {
		t.Errorf("EXISTS answered %q after a restart", got)
	}
}

func TestRedisArguments(t *testing.T) {
	t.Parallel()
	s := startRedis(t, "--appendonly", "yes", "--appendfsync", "always")
	if got := ask(t, s.URL(), "SET a 1"); got != "+OK" {
		t.Fatalf("SET answered %q", got)
	}
	must(t, s.Kill())
	must(t, s.Restart(t.Context()))
	if got := ask(t, s.URL(), "EXISTS a"); got != ":1" {
		t.Errorf("EXISTS answered %q after a crash with appendonly", got)
	}
}
