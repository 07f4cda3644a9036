package commitbox_test

import (
	"regexp"
	"strings"
	"testing"

	"github.com/commitbox/commitbox"
)

var (
	metricName = regexp.MustCompile(`^commitbox_[a-z]+(_[a-z]+)+$`)
	labelName  = regexp.MustCompile(`^[a-z]+(_[a-z]+)*$`)
)

// Names, labels and units are what Prometheus and its naming rules accept.
func TestMetrics(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, m := range commitbox.Metrics() {
		if seen[m.Name] {
			t.Errorf("%s is there twice", m.Name)
		}
		seen[m.Name] = true
		if !metricName.MatchString(m.Name) {
			t.Errorf("name %q", m.Name)
		}
		if m.Help == "" || !strings.HasSuffix(m.Help, ".") {
			t.Errorf("%s: help %q is not a sentence", m.Name, m.Help)
		}
		want := "1"
		switch {
		case strings.HasSuffix(m.Name, "_seconds"):
			want = "s"
		case strings.HasSuffix(m.Name, "_bytes"):
			want = "By"
		}
		if m.Unit != want {
			t.Errorf("%s has unit %q", m.Name, m.Unit)
		}
		if (m.Kind == commitbox.Histogram) != (m.Unit == "s") {
			t.Errorf("%s: kind %d does not fit the unit %q", m.Name, m.Kind, m.Unit)
		}
		checkLabels(t, m)
	}
	if len(seen) == 0 {
		t.Error("nothing is measured")
	}
}

// checkLabels also refuses names that Prometheus keeps for itself, and values without bound.
func checkLabels(t *testing.T, m *commitbox.Metric) {
	t.Helper()
	kept := map[string]bool{"le": true, "quantile": true, "id": true, "message_id": true, "key": true, "topic": true, "error": true}
	for i, label := range m.Labels {
		if !labelName.MatchString(label) || kept[label] {
			t.Errorf("%s: label %q", m.Name, label)
		}
		for _, other := range m.Labels[:i] {
			if other == label {
				t.Errorf("%s: label %q is there twice", m.Name, label)
			}
		}
	}
}

// A caller may change the list that it gets.
func TestMetricsReturnsACopy(t *testing.T) {
	t.Parallel()
	commitbox.Metrics()[0] = nil
	if commitbox.Metrics()[0] == nil {
		t.Error("the library's own list has changed")
	}
}

// Discard takes whatever it gets without a panic.
func TestDiscard(t *testing.T) {
	t.Parallel()
	for _, m := range commitbox.Metrics() {
		commitbox.Discard.Observe(m, 1, m.Labels...)
	}
	commitbox.Discard.Observe(nil, 0)
}

func TestInputError(t *testing.T) {
	t.Parallel()
	for want, err := range map[string]*commitbox.InputError{
		"commitbox: Message.Topic is too long: 300 bytes, the limit is 255": {Field: "Message.Topic", Problem: "is too long", Size: 300, Limit: 255},
		"commitbox: tx is nil": {Field: "tx", Problem: "is nil"},
	} {
		if got := err.Error(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
