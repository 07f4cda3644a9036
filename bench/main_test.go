package bench

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(childURL); url != "" {
		relayInChild(url)
		return
	}
	flag.Parse()
	if err := runOnce(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(2)
	}
	testenv.Main(m)
}

// runOnce makes each family run once where -benchtime is not given: the testing package would repeat a short one.
func runOnce() error {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.benchtime" })
	if given {
		return nil
	}
	return flag.Set("test.benchtime", "1x")
}
