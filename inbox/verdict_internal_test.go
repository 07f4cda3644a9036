package inbox

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/commitbox/commitbox"
)

// What an operator should see is logged with the message it is about.
func TestVerdictsThatAreLogged(t *testing.T) {
	t.Parallel()
	id, epoch := ID{"c", "m"}, int64(1)
	for name, c := range map[string]struct {
		verdict verdict
		want    string // empty: nothing is logged
	}{
		"panic":            {verdict{outcome: Failed, attempt: 2, err: &PanicError{Value: "v", Stack: []byte("frames")}}, `level=ERROR msg="inbox: the handler panicked" consumer=c message_id=m outcome=failed attempt=2 stack=frames`},
		"ended":            {verdict{outcome: Failed, attempt: 2, err: ErrTxEnded}, `level=ERROR msg="inbox: the handler ended its transaction; look at what it committed" consumer=c message_id=m outcome=failed attempt=2`},
		"unknown":          {verdict{outcome: Unknown, attempt: 2}, `level=WARN msg="inbox: the answer to COMMIT was lost; the next delivery finds out" consumer=c message_id=m outcome=unknown attempt=2`},
		"dead now":         {verdict{outcome: Dead, attempt: 2, seen: &epoch, payloadKept: true}, `level=WARN msg="inbox: a message needs a person" consumer=c message_id=m outcome=dead attempt=2 payload_kept=true`},
		"mismatch":         {verdict{outcome: Mismatch, attempt: 2}, `level=WARN msg="inbox: a message needs a person" consumer=c message_id=m outcome=mismatch attempt=2 payload_kept=false`},
		"dead from before": {verdict{outcome: Dead, attempt: 2}, ""},
		"executed":         {verdict{outcome: Executed, attempt: 1}, ""},
	} {
		var logged bytes.Buffer
		s := settings{Config: Config{Observer: silent{}, Logger: slog.New(slog.NewTextHandler(&logged, nil))}}
		s.report(t.Context(), id, c.verdict, time.Now())
		_, got, _ := strings.Cut(strings.TrimSpace(logged.String()), " ") // the time
		if got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", name, got, c.want)
		}
	}
}

type silent struct{}

func (silent) Observe(*commitbox.Metric, float64, ...string) {}
