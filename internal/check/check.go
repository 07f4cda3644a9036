// Package check refuses bad arguments with a *commitbox.InputError, before PostgreSQL would refuse them and abort the
// caller's transaction.
package check

import (
	"errors"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
)

// Text checks a required text: not empty, at most max bytes, valid UTF-8, no NUL.
func Text(field, value string, max int) error {
	if value == "" {
		return &commitbox.InputError{Field: field, Problem: "is empty", Limit: max}
	}
	return OptionalText(field, value, max)
}

// OptionalText checks a text that may be empty.
func OptionalText(field, value string, max int) error {
	switch {
	case len(value) > max:
		return &commitbox.InputError{Field: field, Problem: "is too long", Size: len(value), Limit: max}
	case strings.IndexByte(value, 0) >= 0:
		return &commitbox.InputError{Field: field, Problem: "contains a NUL byte"}
	case !utf8.ValidString(value):
		return &commitbox.InputError{Field: field, Problem: "is not valid UTF-8"}
	}
	return nil
}

// Size checks the length of bytes.
func Size(field string, size, max int) error {
	if size > max {
		return &commitbox.InputError{Field: field, Problem: "is too large", Size: size, Limit: max}
	}
	return nil
}

// Tx checks that there is a transaction.
func Tx(tx pgx.Tx) error {
	if tx == nil {
		return &commitbox.InputError{Field: "tx", Problem: "is nil"}
	}
	return nil
}

// Ended turns the answer of a transaction that has ended already into an InputError; other errors are passed on.
func Ended(err error) error {
	if errors.Is(err, pgx.ErrTxClosed) {
		return errors.Join(&commitbox.InputError{Field: "tx", Problem: "has ended; begin a new transaction"}, err)
	}
	return err
}

// Clean makes the text of an error storable: valid UTF-8 without NUL, at most max bytes, cut at a character. Storing it
// must never be the reason that a failure is not recorded.
func Clean(text string, max int) string {
	text = strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
	if len(text) <= max {
		return text
	}
	for max > 0 && !utf8.RuneStart(text[max]) {
		max--
	}
	return text[:max]
}
