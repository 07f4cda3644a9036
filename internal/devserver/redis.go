package devserver

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/url"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// RedisOptions says how Redis is started.
type RedisOptions struct {
	// Args are further arguments of redis-server, for example
	// "--maxmemory", "10mb". By default nothing is written to disk, so a
	// restart forgets everything.
	Args []string
}

// StartRedis starts an empty Redis without a password.
func StartRedis(ctx context.Context, o RedisOptions) (*Server, error) {
	path, err := FindRedis()
	if err != nil {
		return nil, err
	}
	at, err := newPlace("redis", "redis")
	if err != nil {
		return nil, err
	}
	args := []string{"--bind", "127.0.0.1", "--port", strconv.Itoa(at.port), "--dir", at.dir, "--save", "", "--appendonly", "no"}
	return open(ctx, &Server{
		url:        fmt.Sprintf("redis://%s/0", loopback(at.port)),
		dir:        at.dir,
		stopSignal: syscall.SIGTERM,
		ready:      func(ctx context.Context) error { return pingRedis(ctx, at.port) },
		command: command{
			path:   path,
			args:   append(args, o.Args...),
			folder: at.dir,
			log:    filepath.Join(at.dir, "log"),
			as:     at.as,
		},
	})
}

// StartSentinel starts a Sentinel that watches a Redis, given by its URL, under
// a name. With one Sentinel a failover needs no other's consent; it starts when
// the Redis has not answered for a second.
func StartSentinel(ctx context.Context, name, target string) (*Server, error) {
	u, err := url.Parse(target)
	if err != nil || u.Port() == "" {
		return nil, fmt.Errorf("devserver: the target of sentinel must be a URL (redis://host:port)")
	}
	path, err := FindRedis()
	if err != nil {
		return nil, err
	}
	at, err := newPlace("sentinel", "redis")
	if err != nil {
		return nil, err
	}
	config := filepath.Join(at.dir, "sentinel.conf")
	text := fmt.Sprintf("bind 127.0.0.1\nport %d\ndir %s\nsentinel monitor %s %s %s 1\nsentinel down-after-milliseconds %s 1000\nsentinel failover-timeout %s 5000\n",
		at.port, at.dir, name, u.Hostname(), u.Port(), name, name)
	return open(ctx, &Server{
		url:        fmt.Sprintf("redis://%s/0", loopback(at.port)),
		dir:        at.dir,
		stopSignal: syscall.SIGTERM,
		ready:      func(ctx context.Context) error { return pingRedis(ctx, at.port) },
		command: command{
			path:   path,
			args:   []string{config, "--sentinel"},
			folder: at.dir,
			log:    filepath.Join(at.dir, "log"),
			as:     at.as,
		},
	}, func(context.Context) error { return at.as.writeFile(config, text, 0o600) })
}

// FindRedis returns the path of redis-server on this machine. The error is a
// [*MissingError] if there is none.
func FindRedis() (string, error) {
	return findBinary("redis-server")
}

func pingRedis(ctx context.Context, port int) error {
	conn, err := dial(ctx, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("PING\r\n")); err != nil {
		return err
	}
	answer, err := bufio.NewReader(conn).ReadString('\n')
	if err != nil {
		return err
	}
	if !strings.HasPrefix(answer, "+PONG") {
		return fmt.Errorf("redis answered %q to PING", answer)
	}
	return nil
}

// dial connects to a loopback port; reads and writes end with ctx's deadline.
func dial(ctx context.Context, port int) (net.Conn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", loopback(port))
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return nil, err
		}
	}
	return conn, nil
}
