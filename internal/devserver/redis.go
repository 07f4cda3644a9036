package devserver

import (
	"bufio"
	"context"
	"fmt"
	"net"
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
