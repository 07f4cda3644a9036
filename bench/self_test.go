package bench

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestInterleaveRotatesTheContenders(t *testing.T) {
	t.Parallel()
	var order string
	named := func(name string) contender {
		return contender{name, func(*testing.B) float64 {
			order += name
			return float64(len(order))
		}}
	}
	f := interleave(nil, 3, named("a"), named("b"), named("c"))
	if order != "abcbcacab" {
		t.Errorf("order %s", order)
	}
	if diff := cmp.Diff(map[string][]float64{"a": {1, 6, 8}, "b": {2, 4, 9}, "c": {3, 5, 7}}, f.samples); diff != "" {
		t.Error(diff)
	}
	if got, want := f.ratio("a", "c"), 8.0/7.0; got != want {
		t.Errorf("ratio %v, not %v", got, want)
	}
}

func TestQuantileIsTheNearestRank(t *testing.T) {
	t.Parallel()
	samples := []float64{9, 1, 5}
	for q, want := range map[float64]float64{0: 1, 0.5: 5, 0.99: 9, 1: 9} {
		if got := quantile(samples, q); got != want {
			t.Errorf("quantile %v is %v, not %v", q, got, want)
		}
	}
}
