package migrate_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// childURL names the database that this program migrates instead of running tests, for tests that kill a migrator.
const childURL = "MIGRATE_TEST_CHILD_URL"

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		os.Exit(child(url))
	}
	testenv.Main(m)
}

func child(url string) int {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, url)
	if err == nil {
		defer pool.Close()
		err = migrate.Up(ctx, pool, migrate.Config{})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}
