package check

import "testing"

func TestTraceID(t *testing.T) {
	const id, span = "0123456789abcdef0123456789abcdef", "0123456789abcdef"
	for header, want := range map[string]string{
		"00-" + id + "-" + span + "-01":                       id,
		"01-" + id + "-" + span + "-01":                       id,
		"01-" + id + "-" + span + "-01-new":                   id,
		"00-" + id + "-" + span + "-01-new":                   "",
		"ff-" + id + "-" + span + "-01":                       "",
		"00-" + id:                                            "",
		"00-short-" + span + "-01":                            "",
		"00-0123456789abcdef0123456789abcdeX-" + span + "-01": "",
		"00-0123456789ABCDEF0123456789abcdef-" + span + "-01": "",
		"00-00000000000000000000000000000000-" + span + "-01": "",
		"00-" + id + "-0000000000000000-01":                   "",
		"00-" + id + "-" + span + "-1":                        "",
		"":                                                    "",
		"---":                                                 "",
	} {
		if got := TraceID(header); got != want {
			t.Errorf("%q: %q, want %q", header, got, want)
		}
	}
}
