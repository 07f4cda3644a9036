package httpidem

import (
	"errors"
	"strings"
	"testing"
)

func TestParseKey(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		values   []string
		unquoted bool
		want     string
		problem  error
	}{
		{[]string{`"8e03978e-40d5-43e8-bc93-6894a57f9324"`}, false, "8e03978e-40d5-43e8-bc93-6894a57f9324", nil},
		{[]string{`  "a b"  `}, false, "a b", nil},
		{[]string{`"a\"b\\c"`}, false, `a"b\c`, nil},
		{[]string{`"!~"`}, false, "!~", nil},
		{[]string{`abc`}, true, "abc", nil},
		{[]string{`"abc"`}, true, "abc", nil},
		{nil, false, "", errKeyMissing},
		{[]string{`"a"`, `"a"`}, false, "", errKeyMany},
		{[]string{``}, false, "", errKeyEmpty},
		{[]string{`""`}, true, "", errKeyEmpty},
		{[]string{`abc`}, false, "", errKeySyntax},
		{[]string{`"a`}, true, "", errKeySyntax},
		{[]string{`a"`}, true, "", errKeySyntax},
		{[]string{`"`}, true, "", errKeySyntax},
		{[]string{`"a\"`}, false, "", errKeySyntax},
		{[]string{`"a\n"`}, false, "", errKeySyntax},
		{[]string{`"a"b"`}, false, "", errKeySyntax},
		{[]string{`"a", "b"`}, false, "", errKeySyntax},
		{[]string{`"a";p=1`}, false, "", errKeySyntax},
		{[]string{"\"a\x00\""}, false, "", errKeySyntax},
		{[]string{"\"a\tb\""}, false, "", errKeySyntax},
		{[]string{"\"a\x7f\""}, false, "", errKeySyntax},
		{[]string{`"schlüssel"`}, false, "", errKeySyntax},
		{[]string{"\"\xff\""}, true, "", errKeySyntax},
		{[]string{`a;drop`}, true, "", errKeySyntax},
		{[]string{`../../etc`}, true, "../../etc", nil}, // a name like any other: it is no path
		{[]string{`"` + strings.Repeat("k", 16) + `"`}, false, strings.Repeat("k", 16), nil},
		{[]string{`"` + strings.Repeat(`\"`, 16) + `"`}, false, strings.Repeat(`"`, 16), nil},
		{[]string{`"` + strings.Repeat("k", 17) + `"`}, false, "", errKeyLong},
		{[]string{`"` + strings.Repeat("k", 1<<20) + `"`}, false, "", errKeyLong},
	} {
		got, err := parseKey(c.values, 16, c.unquoted)
		if len(c.values) > 0 && len(c.want) > 16 {
			got, err = parseKey(c.values, 255, c.unquoted)
		}
		if got != c.want || !errors.Is(err, c.problem) {
			t.Errorf("%.40q: got %q, %v; want %q, %v", c.values, got, err, c.want, c.problem)
		}
	}
}

func FuzzParseKey(f *testing.F) {
	for _, seed := range []string{`"a"`, `"a\"b"`, `"`, `a`, `"\\`, "\"\x00\""} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		key, err := parseKey([]string{text}, 32, true)
		if err != nil {
			return
		}
		if key == "" || len(key) > 32 || strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }) {
			t.Errorf("%q gives the key %q", text, key)
		}
		again, err := parseKey([]string{`"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`}, 32, false)
		if err != nil || again != key {
			t.Errorf("%q, quoted, gives %q, %v", key, again, err)
		}
	})
}

// TestKeysOfTwoScopesNeverMeet: no scope and key spell another scope's id, however long they are.
func TestKeysOfTwoScopesNeverMeet(t *testing.T) {
	t.Parallel()
	long := strings.Repeat(`"`, 255)
	seen := map[string][2]string{}
	for _, scope := range []string{"a", "a/b", "a%2F", "A", long, long + "x", "b/"} {
		for _, key := range []string{"k", "b/k", "/k", "2Fk", long, "x" + long[1:]} {
			id, err := newID("n", scope, key)
			if err != nil {
				t.Fatal(err)
			}
			if other, found := seen[id.String()]; found {
				t.Errorf("%q and %q are one id", other, [2]string{scope, key})
			}
			seen[id.String()] = [2]string{scope, key}
		}
	}
}
