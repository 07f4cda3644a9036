package inbox

import (
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/commitbox/commitbox"
)

// Parts are the four things that an id is made of by [NewID].
type Parts struct {
	Service   string // required
	Function  string // required
	Partition string // may be empty
	Serial    string // required
}

const idSeparator = "/"

// NewID makes the canonical id of a call: the consumer is service/function, the message partition/serial. Parts are
// escaped, so that different parts never give one id; [ID.Parts] reads them back. The same form is the key in every
// store. Parts are any bytes; the limits of an [ID] hold for the escaped form. Not promised: that the id is unique or stays
// the same on a retry, which is the serial's part; and that parts which look alike, such as two forms of one letter, give
// one id.
func NewID(service, function, partition, serial string) (ID, error) {
	err := errors.Join(require("service", service), require("function", function), require("serial", serial))
	if err != nil {
		return ID{}, err
	}
	id := ID{
		Consumer: escape(service) + idSeparator + escape(function),
		Message:  escape(partition) + idSeparator + escape(serial),
	}
	return id, id.check()
}

func require(field, value string) error {
	if value == "" {
		return &commitbox.InputError{Field: field, Problem: "is empty"}
	}
	return nil
}

// Parts reads an id of the form that NewID makes; any other is an error. Not promised: that NewID has made it.
func (id ID) Parts() (Parts, error) {
	service, function, ok1 := strings.Cut(id.Consumer, idSeparator)
	partition, serial, ok2 := strings.Cut(id.Message, idSeparator)
	raw := [4]string{service, function, partition, serial}
	var part [4]string
	for i, text := range raw {
		var err error
		if part[i], err = url.PathUnescape(text); err != nil || escape(part[i]) != text {
			return Parts{}, errNotMade(id)
		}
	}
	if !ok1 || !ok2 || part[0] == "" || part[1] == "" || part[3] == "" {
		return Parts{}, errNotMade(id)
	}
	return Parts{part[0], part[1], part[2], part[3]}, nil
}

func errNotMade(id ID) error {
	return fmt.Errorf("inbox: the id %q was not made by NewID", id.String())
}

// Key is the one text under which a store other than the table keeps the message: printable ASCII, different for different
// ids, and without braces, spaces and line ends. Of an id that NewID made from plain parts it is
// service/function|partition/serial. Not promised: a bounded length: it is up to three times that of the id.
func (id ID) Key() string { return escape(id.Consumer, '/') + "|" + escape(id.Message, '/') }

// escape writes every byte that is no ASCII letter, digit, '-', '_', '.', '~' or ':', and none of keep, as %XX.
func escape(text string, keep ...byte) string {
	const hex = "0123456789ABCDEF"
	var out strings.Builder
	out.Grow(len(text))
	for i := range len(text) {
		if c := text[i]; plain(c) || slices.Contains(keep, c) {
			out.WriteByte(c)
		} else {
			out.Write([]byte{'%', hex[c>>4], hex[c&15]})
		}
	}
	return out.String()
}

func plain(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte("-_.~:", c) >= 0
}
