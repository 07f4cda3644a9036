package inbox_test

import (
	"strings"
	"testing"

	"github.com/commitbox/commitbox/inbox"
)

func TestNewID(t *testing.T) {
	id, err := inbox.NewID("shop", "pay/charge", "eu 1", "17%")
	if err != nil || id.Consumer != "shop/pay%2Fcharge" || id.Message != "eu%201/17%25" {
		t.Errorf("%q, %v", id, err)
	}
	if _, err := inbox.NewID("", "f", "", "1"); err == nil {
		t.Error("an empty service was taken")
	}
	for _, other := range []inbox.ID{{Consumer: "plain", Message: "id"}, {Consumer: "a/b", Message: "c/%2f"}, {Consumer: "a/b", Message: "c/d/e"}} {
		if _, err := other.Parts(); err == nil {
			t.Errorf("%q was read", other)
		}
	}
}

// TestB7_OneKeyPerID shows that different ids have different keys, whatever is in them.
func TestB7_OneKeyPerID(t *testing.T) {
	id, err := inbox.NewID("shop", "charge", "eu", "17")
	if err != nil || id.Key() != "shop/charge|eu/17" {
		t.Errorf("the key is %q, %v", id.Key(), err)
	}
	seen := map[string]inbox.ID{}
	texts := []string{"", "a", "|", "a|", "|a", "%7C", "/", "%2F", "{a}", "a}", "\x00", " ", "\n", "é", "A"}
	for _, consumer := range texts {
		for _, message := range texts {
			id := inbox.ID{Consumer: consumer, Message: message}
			key := id.Key()
			if other, ok := seen[key]; ok {
				t.Errorf("%q and %q have the key %q", id, other, key)
			}
			seen[key] = id
			if strings.ContainsAny(key, "{} \n\r\x00") {
				t.Errorf("the key %q cannot be a hash tag", key)
			}
		}
	}
}

func FuzzNewID(f *testing.F) {
	f.Add("a", "b", "c", "d")
	f.Add("a/b", "%2F", "\x00", "\xff{}")
	f.Fuzz(func(t *testing.T, service, function, partition, serial string) {
		id, err := inbox.NewID(service, function, partition, serial)
		if err != nil {
			return
		}
		parts, err := id.Parts()
		if err != nil || parts != (inbox.Parts{Service: service, Function: function, Partition: partition, Serial: serial}) {
			t.Errorf("%q is read as %+v, %v", id, parts, err)
		}
	})
}
