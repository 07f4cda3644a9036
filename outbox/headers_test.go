package outbox

import (
	"encoding/json"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
)

// FuzzHeaders compares the short way with encoding/json, on which the long way rests.
func FuzzHeaders(f *testing.F) {
	for _, text := range []string{
		`{}`, `{"a": "b"}`, `{"a": "b", "c": "d"}`, `{"a": ""}`, `{"": "b"}`, `{"a": "b\"c"}`, `{"a": "\u00e9"}`, `{"ä": "ö"}`,
		`{"a": 1}`, `{"a": "b", "c": {"d": "e"}}`, `{"a": ["b"]}`, `{"a": null}`, `[]`, `null`, ``, `{`, `{"`, `{"a"`, `{"a": `,
		`{"a": "b"`, `{"a": "b",`, `{"a": "b", `, `{"a": "b"}}`, `{"a": "b"} `, `{"a":"b"}`, `{"a": "b","c": "d"}`, `{"a: ": ", "}`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var want map[string]string
		wantErr := json.Unmarshal([]byte(text), &want)
		got := plainHeaders(text)
		if !json.Valid([]byte(text)) || !utf8.ValidString(text) {
			return // jsonb is valid: control characters in strings are escaped
		}
		if got != nil && (wantErr != nil || !cmp.Equal(got, want)) {
			t.Errorf("%q: %v, want %v, %v", text, got, want, wantErr)
		}
		if _, err := headers(text); (err == nil) != (wantErr == nil) {
			t.Errorf("%q: error %v, want %v", text, err, wantErr)
		}
	})
}

func TestHeadersWithoutEscapesTakeTheShortWay(t *testing.T) {
	for _, text := range []string{`{"a": "b"}`, `{"a": "b", "c": "d"}`, `{"a, ": "b: "}`} {
		if plainHeaders(text) == nil {
			t.Errorf("%s was not read", text)
		}
	}
	if got, want := plainHeaders(`{"a": "b", "traceparent": "00-1-2-01"}`), (map[string]string{"a": "b", "traceparent": "00-1-2-01"}); !cmp.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}
