package bench

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
)

// report is the table of a family.
type report struct {
	b      *testing.B
	title  string
	facts  []string
	lines  []string
	checks []string
}

// newReport begins a table. The facts say what was measured: rows, workers, whatever a reader needs to judge it.
func newReport(b *testing.B, db *database, title string, facts ...string) *report {
	return &report{b: b, title: title, facts: append(facts, db.facts)}
}

// figures adds a line per contender: its median, lowest and highest value.
func (r *report) figures(unit string, f figures) {
	r.lines = append(r.lines, "contender\tmedian\tlow\thigh\t")
	for _, name := range f.names {
		s := f.samples[name]
		r.lines = append(r.lines, fmt.Sprintf("%s\t%s %s\t%s\t%s\t", name, number(f.median(name)), unit, number(slices.Min(s)), number(slices.Max(s))))
	}
}

// atLeast adds a figure with its lower bound, and reports it as a metric of the benchmark.
func (r *report) atLeast(name string, got, bound float64) {
	r.check(name, got, "≥ "+number(bound), got >= bound)
}

// atMost adds a figure with its upper bound.
func (r *report) atMost(name string, got, bound float64) {
	r.check(name, got, "≤ "+number(bound), got <= bound)
}

// noted adds a figure without a bound.
func (r *report) noted(name string, got float64) { r.add(name, got, "", "reported") }

func (r *report) check(name string, got float64, bound string, ok bool) {
	verdict := "ok"
	if !ok {
		verdict = "MISSED"
	}
	r.add(name, got, bound, verdict)
}

func (r *report) add(name string, got float64, bound, verdict string) {
	r.checks = append(r.checks, fmt.Sprintf("%s\t%s\t%s\t%s\t", name, number(got), bound, verdict))
	r.b.ReportMetric(got, metricName.Replace(name))
}

// metricName makes a unit of a name, which may hold no spaces.
var metricName = strings.NewReplacer(" / ", "/", " ", "-")

// print writes the table at once, so that it is there even if a later family hangs. The testing package writes the
// benchmark's result line after it.
func (r *report) print() {
	var text strings.Builder
	fmt.Fprintf(&text, "\n== %s\n", r.title)
	for _, fact := range r.facts {
		fmt.Fprintf(&text, "   %s\n", fact)
	}
	for _, block := range [][]string{r.lines, r.checks} {
		w := tabwriter.NewWriter(&text, 0, 0, 3, ' ', tabwriter.AlignRight)
		if len(block) > 0 {
			fmt.Fprintln(w)
		}
		for _, line := range block {
			fmt.Fprintln(w, line)
		}
		if err := w.Flush(); err != nil {
			r.b.Fatal(err)
		}
	}
	fmt.Fprintln(os.Stdout, text.String())
}

// number writes a figure with about three digits that count.
func number(x float64) string {
	switch {
	case x >= 100:
		return fmt.Sprintf("%.0f", x)
	case x >= 10:
		return fmt.Sprintf("%.1f", x)
	}
	return fmt.Sprintf("%.2f", x)
}

const (
	watermillModule = "github.com/ThreeDotsLabs/watermill-sql/v4"
	riverModule     = "github.com/riverqueue/river"
)

// versionOf reads a peer's version from go.mod: a test binary does not know what it is built of.
func versionOf(b *testing.B, module string) string {
	b.Helper()
	text, err := os.ReadFile("go.mod")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) >= 2 && fields[0] == module {
			return fields[1]
		}
	}
	b.Fatalf("go.mod does not require %s", module)
	return ""
}
