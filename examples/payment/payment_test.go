package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
)

// TestA5_Payment kills workers at points of the saga while the payment service loses answers. COMMITBOX_SOAK=1 takes every
// point.
func TestA5_Payment(t *testing.T) {
	t.Parallel()
	cfg := config{DatabaseURL: testenv.EmptyDatabase(t).URL, AMQPURL: testenv.RabbitMQ(t), Kills: 10}
	if os.Getenv("COMMITBOX_SOAK") != "" {
		cfg.Kills = 0
	}
	var out bytes.Buffer
	if err := run(t.Context(), cfg, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	for _, want := range []string{"after POST /charges", "after POST /refunds", "done, then no answer in time"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the run has no %q:\n%s", want, &out)
		}
	}
	t.Logf("\n%s", &out)
}
