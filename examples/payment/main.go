// Command payment sells things: an HTTP API takes orders, a worker takes the money at a payment service that loses answers, and
// takes the goods out of stock. The worker is killed again and again, wherever it is. At the end every order is paid for once,
// or given back once, or was never charged.
//
// What a service would hold is in the packages shop and saga. Everything else starts them, breaks them and counts.
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
	slog.SetDefault(slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError + 1})))
	if err := dispatch(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "payment:", err)
		stop()
		os.Exit(1)
	}
}

// dispatch runs the whole program, or one component if that is what args name: this is how the program starts itself again.
func dispatch(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 1 {
		return runChild(ctx, args[0], out)
	}
	cfg, err := configFromEnv()
	if err != nil {
		return err
	}
	return run(ctx, cfg, out)
}

// config is what the environment says.
type config struct {
	DatabaseURL string // DATABASE_URL: the program makes a database of its own on that server
	AMQPURL     string // AMQP_URL
	Kills       int    // KILLS, default 20; 0: once at each point
}

func configFromEnv() (config, error) {
	cfg := config{DatabaseURL: os.Getenv("DATABASE_URL"), AMQPURL: os.Getenv("AMQP_URL"), Kills: 20}
	var errs []error
	if text := os.Getenv("KILLS"); text != "" {
		var err error
		if cfg.Kills, err = strconv.Atoi(text); err != nil || cfg.Kills < 0 {
			errs = append(errs, fmt.Errorf("KILLS must be a number, not %q", text))
		}
	}
	if cfg.DatabaseURL == "" || cfg.AMQPURL == "" {
		errs = append(errs, errors.New("DATABASE_URL or AMQP_URL is missing; `make example NAME=payment` sets them"))
	}
	return cfg, errors.Join(errs...)
}
