package devserver

import (
	"context"
	"fmt"
	"net/url"
	"path/filepath"
	"strings"
	"syscall"
)

// PgBouncerOptions says which PostgreSQL a PgBouncer stands in front of.
type PgBouncerOptions struct {
	// Target is the URL of the PostgreSQL server. All its databases can be
	// reached, always as the user of this URL.
	Target string
	// PoolSize is the number of server connections per database, 2 by default.
	PoolSize int
	// Settings are further lines of the [pgbouncer] section.
	Settings []string
}

// StartPgBouncer starts a PgBouncer in transaction mode that asks for no
// password. Its URL names the database of the target. If it ends by itself it is
// started again: versions before 1.21 do when a cancel request meets an answer
// ("server in bad state").
func StartPgBouncer(ctx context.Context, o PgBouncerOptions) (*Server, error) {
	target, err := url.Parse(o.Target)
	if err != nil || target.Host == "" {
		return nil, fmt.Errorf("devserver: the target of pgbouncer must be a URL (postgres://user@host:port/database)")
	}
	path, err := FindPgBouncer()
	if err != nil {
		return nil, err
	}
	at, err := newPlace("pgbouncer", "postgres")
	if err != nil {
		return nil, err
	}
	config := filepath.Join(at.dir, "pgbouncer.ini")
	through := fmt.Sprintf("postgres://%s@%s%s?sslmode=disable", target.User.Username(), loopback(at.port), target.Path)
	return open(ctx, &Server{
		url:        through,
		dir:        at.dir,
		stopSignal: syscall.SIGTERM,
		revive:     true,
		ready:      func(ctx context.Context) error { return pingPostgres(ctx, through) },
		command: command{
			path:   path,
			args:   []string{config},
			folder: at.dir,
			log:    filepath.Join(at.dir, "log"),
			as:     at.as,
		},
	}, func(context.Context) error { return at.as.writeFile(config, o.config(target, at.port), 0o600) })
}

// FindPgBouncer returns the path of pgbouncer on this machine. The error is a
// [*MissingError] if there is none.
func FindPgBouncer() (string, error) {
	return findBinary("pgbouncer", "/usr/sbin/pgbouncer")
}

func (o PgBouncerOptions) config(target *url.URL, port int) string {
	size := o.PoolSize
	if size == 0 {
		size = 2
	}
	database := []string{"* =", "host=" + target.Hostname(), "user=" + quoteValue(target.User.Username())}
	if target.Port() != "" {
		database = append(database, "port="+target.Port())
	}
	if password, ok := target.User.Password(); ok {
		database = append(database, "password="+quoteValue(password))
	}
	lines := []string{
		"[databases]",
		strings.Join(database, " "),
		"[pgbouncer]",
		"listen_addr = 127.0.0.1",
		fmt.Sprintf("listen_port = %d", port),
		"unix_socket_dir =",
		"auth_type = any",
		"pool_mode = transaction",
		fmt.Sprintf("default_pool_size = %d", size),
		"max_client_conn = 500",
	}
	return strings.Join(append(lines, o.Settings...), "\n") + "\n"
}

func quoteValue(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }
