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
	r.b.ReportMetric(got, strings.ReplaceAll(name, " ", "-"))
}

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
