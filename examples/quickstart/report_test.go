package main

import (
	"bytes"
	"testing"
)

func TestVerdict(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		report report
		good   bool
	}{
		{"well", report{DuplicatesReceived: 1}, true},
		{"nothing was repeated", report{}, false},
		{"lost", report{DuplicatesReceived: 1, Lost: 1}, false},
		{"twice", report{DuplicatesReceived: 1, DoubleEffects: 1}, false},
	} {
		if err := c.report.verdict(); (err == nil) != c.good {
			t.Errorf("%s: %v", c.name, err)
		}
	}
}

// The keys of the last line are read by programs.
func TestLastLineOfTheReport(t *testing.T) {
	t.Parallel()
	r := report{Orders: 1, Delivered: 2, Received: 3, DuplicatesReceived: 4, Effects: 5, Lost: 6, DoubleEffects: 7, Seconds: 8.5}
	var out bytes.Buffer
	if err := r.write(&out); err != nil {
		t.Fatal(err)
	}
	const want = `{"orders":1,"delivered":2,"received":3,"duplicates_received":4,"effects":5,"lost":6,"double_effects":7,"seconds":8.5}`
	if got := lastLine(out.String()); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}
