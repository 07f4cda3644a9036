package devserver

import (
	"context"
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// PostgresOptions says which PostgreSQL is started and how.
type PostgresOptions struct {
	// BinDir holds initdb and postgres. Default: what [PostgresBinDir] finds.
	BinDir string
	// Durable keeps fsync, full_page_writes and synchronous_commit on, for
	// tests that kill the server. Default: all three off, which is faster and
	// loses data when the server crashes.
	Durable bool
	// MaxConnections defaults to 200.
	MaxConnections int
	// Settings are further server settings; they win over the ones above.
	Settings map[string]string
}

// StartPostgres makes a new, empty PostgreSQL cluster and starts it. Its
// superuser is postgres, without a password, and its locale is C with UTF-8.
func StartPostgres(ctx context.Context, o PostgresOptions) (*Server, error) {
	if o.BinDir == "" {
		found, err := PostgresBinDir(0)
		if err != nil {
			return nil, err
		}
		o.BinDir = found
	}
	at, err := newPlace("postgres", "postgres")
	if err != nil {
		return nil, err
	}
	url := fmt.Sprintf("postgres://postgres@%s/postgres?sslmode=disable", loopback(at.port))
	initdb := command{
		path:   filepath.Join(o.BinDir, "initdb"),
		args:   []string{"-D", dataDir(at.dir), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"},
		folder: at.dir,
		as:     at.as,
	}
	s := &Server{
		url:        url,
		dir:        at.dir,
		stopSignal: syscall.SIGINT, // fast shutdown: ends sessions, writes a checkpoint
		ready:      func(ctx context.Context) error { return pingPostgres(ctx, url) },
		command: command{
			path:   filepath.Join(o.BinDir, "postgres"),
			args:   o.arguments(at.dir, at.port),
			folder: at.dir,
			log:    filepath.Join(at.dir, "log"),
			as:     at.as,
		},
	}
	return open(ctx, s, func(ctx context.Context) error { return run(ctx, initdb) })
}

func dataDir(dir string) string { return filepath.Join(dir, "data") }

// arguments turns the options into settings on the command line.
func (o PostgresOptions) arguments(dir string, port int) []string {
	settings := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(port),
		"unix_socket_directories": dir,
		"max_connections":         "200",
		"logging_collector":       "off",
	}
	if o.MaxConnections > 0 {
		settings["max_connections"] = strconv.Itoa(o.MaxConnections)
	}
	if !o.Durable {
		for _, name := range []string{"fsync", "full_page_writes", "synchronous_commit"} {
			settings[name] = "off"
		}
	}
	maps.Copy(settings, o.Settings)
	args := []string{"-D", dataDir(dir)}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	return args
}

func pingPostgres(ctx context.Context, url string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}

// PostgresDefault is the major version that is used when nobody asks for one.
const PostgresDefault = 15

// PostgresBinDir returns the folder with the programs of a PostgreSQL major
// version on this machine; 0 means [PostgresDefault], or the newest if that is
// not there. The error is a [*MissingError] if there is none.
func PostgresBinDir(version int) (string, error) {
	const debian = "/usr/lib/postgresql/*/bin"
	dirs, err := filepath.Glob(debian)
	if err != nil {
		return "", err
	}
	if path, err := exec.LookPath("postgres"); err == nil {
		if path, err = filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(path))
		}
	}
	installed := make(map[int]string)
	for _, dir := range dirs {
		if v := postgresVersion(dir); v != 0 && installed[v] == "" {
			installed[v] = dir
		}
	}
	if dir := choosePostgres(installed, version); dir != "" {
		return dir, nil
	}
	return "", &MissingError{Service: postgresName(version), Looked: []string{debian, "PATH"}}
}

// choosePostgres returns the folder of a version, as [PostgresBinDir] says, or "".
func choosePostgres(installed map[int]string, version int) string {
	if version != 0 {
		return installed[version]
	}
	if dir := installed[PostgresDefault]; dir != "" {
		return dir
	}
	return installed[slices.Max(append(slices.Collect(maps.Keys(installed)), 0))]
}

func postgresName(version int) string {
	if version == 0 {
		return "postgres"
	}
	return fmt.Sprintf("postgres %d", version)
}

var majorVersion = regexp.MustCompile(`\) (\d+)`)

// postgresVersion asks the programs in a folder for their major version; 0 means
// that they are not complete or do not run.
func postgresVersion(dir string) int {
	if !executable(filepath.Join(dir, "initdb")) {
		return 0
	}
	out, err := exec.Command(filepath.Join(dir, "postgres"), "--version").Output()
	if err != nil {
		return 0
	}
	m := majorVersion.FindSubmatch(out)
	if m == nil {
		return 0
	}
	v, err := strconv.Atoi(string(m[1]))
	if err != nil {
		return 0
	}
	return v
}
