// Command quickstart sends orders through PostgreSQL and a broker while it breaks things on purpose, and counts at the
// end, in the business tables, that nothing was lost and nothing was done twice.
//
// The services are in orders.go, payment.go and timeline.go; they are what a real program would hold. Everything else
// starts them, breaks them and counts.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"strconv"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	slog.SetDefault(newLogger(os.Stderr))
	if err := dispatch(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "quickstart:", err)
		stop()
		os.Exit(exitStatus(err))
	}
}

// newLogger leaves out what a run with kills is full of: connections lost and work repeated.
func newLogger(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelError}))
}

// dispatch runs the whole program, or one component if that is what args name: this is how the program starts itself
// again as a child process.
func dispatch(ctx context.Context, args []string, stdout io.Writer) error {
	if len(args) == 1 {
		return runChild(ctx, args[0], stdout)
	}
	cfg, err := configFromEnv()
	if err != nil {
		return err
	}
	return run(ctx, cfg, stdout, os.Stderr)
}

// config is what the environment says.
type config struct {
	Orders      int    // ORDERS, default 1000
	Broker      string // BROKER: rabbitmq (default) or memory
	DatabaseURL string // DATABASE_URL: the program makes a database of its own on that server
	AMQPURL     string // AMQP_URL, for rabbitmq
}

func configFromEnv() (config, error) {
	cfg := config{Orders: 1000, Broker: "rabbitmq", DatabaseURL: os.Getenv("DATABASE_URL"), AMQPURL: os.Getenv("AMQP_URL")}
	var errs []error
	if text := os.Getenv("ORDERS"); text != "" {
		var err error
		if cfg.Orders, err = strconv.Atoi(text); err != nil || cfg.Orders < 10 {
			errs = append(errs, fmt.Errorf("ORDERS must be a number from 10, not %q", text))
		}
	}
	if text := os.Getenv("BROKER"); text != "" {
		cfg.Broker = text
	}
	if cfg.Broker != "rabbitmq" && cfg.Broker != "memory" {
		errs = append(errs, fmt.Errorf("BROKER must be rabbitmq or memory, not %q", cfg.Broker))
	}
	if cfg.DatabaseURL == "" {
		errs = append(errs, errors.New("DATABASE_URL is missing; `make demo` sets it"))
	}
	if cfg.Broker == "rabbitmq" && cfg.AMQPURL == "" {
		errs = append(errs, errors.New("AMQP_URL is missing; `make demo` sets it, BROKER=memory does without"))
	}
	return cfg, errors.Join(errs...)
}
