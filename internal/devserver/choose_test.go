package devserver

import "testing"

func TestDefaultVersionOfPostgres(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		installed map[int]string
		version   int
		want      string
	}{
		{nil, 0, ""},
		{nil, 15, ""},
		{map[int]string{14: "a", 15: "b", 17: "c"}, 0, "b"},
		{map[int]string{14: "a", 17: "c", 16: "d"}, 0, "c"},
		{map[int]string{14: "a", 15: "b", 17: "c"}, 17, "c"},
		{map[int]string{14: "a", 15: "b"}, 18, ""},
	} {
		if got := choosePostgres(c.installed, c.version); got != c.want {
			t.Errorf("version %d of %v: %q, want %q", c.version, c.installed, got, c.want)
		}
	}
}
