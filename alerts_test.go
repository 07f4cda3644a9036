package commitbox_test

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/commitbox/commitbox"
)

var (
	expression = regexp.MustCompile(`(?s)\n {8}expr: (.*?)\n {8}[a-z]`)
	named      = regexp.MustCompile(`(commitbox_[a-z_]+)(\{([^}]*)\})?`)
	grouped    = regexp.MustCompile(`by \(([^)]*)\)`)
	quoted     = regexp.MustCompile(`"[^"]*"`)
	word       = regexp.MustCompile(`[a-z_]+`)
)

// An alert on a metric or a label that does not exist never fires.
func TestA10_AlertsNameWhatIsMeasured(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("alerts/prometheus.yaml")
	if err != nil {
		t.Fatal(err)
	}
	exported := map[string]*commitbox.Metric{}
	for _, m := range commitbox.Metrics() {
		for _, suffix := range map[commitbox.Kind][]string{
			commitbox.Counter: {"_total"}, commitbox.Gauge: {""}, commitbox.Histogram: {"_bucket", "_sum", "_count"},
		}[m.Kind] {
			exported[m.Name+suffix] = m
		}
	}
	expressions := expression.FindAllStringSubmatch(string(text), -1)
	if alerts := strings.Count(string(text), "- alert: "); len(expressions) != alerts || alerts == 0 {
		t.Fatalf("%d expressions of %d alerts were read", len(expressions), alerts)
	}
	for _, e := range expressions {
		for _, problem := range unknown(e[1], exported) {
			t.Errorf("%s: %s", e[1], problem)
		}
	}
	for _, wrong := range []string{`commitbox_nothing > 0`, `commitbox_outbox_dead > 0`, `commitbox_outbox_dead_total{topic="t"} > 0`, `sum by (key) (commitbox_outbox_dead_total)`} {
		if len(unknown(wrong, exported)) == 0 {
			t.Errorf("nothing is said of %s", wrong)
		}
	}
}

// unknown lists the metrics and labels of an expression that nobody exports.
func unknown(expr string, exported map[string]*commitbox.Metric) (problems []string) {
	labels := map[string]bool{"le": true}
	for _, n := range named.FindAllStringSubmatch(expr, -1) {
		m := exported[n[1]]
		if m == nil {
			problems = append(problems, "no metric "+n[1])
			continue
		}
		for _, label := range m.Labels {
			labels[label] = true
		}
		for _, label := range word.FindAllString(quoted.ReplaceAllString(n[3], ""), -1) {
			if !slices.Contains(m.Labels, label) {
				problems = append(problems, n[1]+" has no label "+label)
			}
		}
	}
	for _, by := range grouped.FindAllStringSubmatch(expr, -1) {
		for _, label := range word.FindAllString(by[1], -1) {
			if !labels[label] {
				problems = append(problems, "no label "+label+" among "+strings.Join(slices.Sorted(maps.Keys(labels)), " "))
			}
		}
	}
	return problems
}
