package rabbitmq

import (
	"os"
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) {
	if os.Getenv(childQueue) != "" {
		os.Exit(runChild())
	}
	testenv.Main(m)
}
