// Package check refuses bad arguments with a *commitbox.InputError, before PostgreSQL would refuse them and abort the
// caller's transaction.
package check

import (
	"cmp"
	"context"
	"errors"
	"reflect"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

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

// Tx checks, without a round trip, that a statement can run in the transaction: that there is one, that it was not ended, by
// its methods or by a COMMIT sent as text, that no error has aborted it, and that its connection is free. Where tx is not
// of pgx, only what its methods tell is seen.
func Tx(ctx context.Context, tx pgx.Tx) error {
	if v := reflect.ValueOf(tx); !v.IsValid() || v.Kind() == reflect.Pointer && v.IsNil() {
		return &commitbox.InputError{Field: "tx", Problem: "is nil"}
	}
	if err := tx.SendBatch(ctx, new(pgx.Batch)).Close(); errors.Is(err, pgx.ErrTxClosed) {
		return ended()
	} else if errors.As(err, new(*commitbox.InputError)) {
		return err
	}
	conn := tx.Conn()
	switch {
	case conn == nil:
		return nil
	case conn.IsClosed():
		return &commitbox.InputError{Field: "tx", Problem: "has lost its connection; begin a new transaction"}
	case conn.PgConn().IsBusy():
		return &commitbox.InputError{Field: "tx", Problem: "has rows open; close them first"}
	}
	switch conn.PgConn().TxStatus() {
	case 'I':
		return ended()
	case 'E':
		return &commitbox.InputError{Field: "tx", Problem: "is aborted by an error of an earlier statement; roll back"}
	}
	return nil
}

func ended() error { return Ended(pgx.ErrTxClosed) }

// Ended turns the answer of a transaction that has ended already into an InputError; other errors are passed on.
func Ended(err error) error {
	if errors.Is(err, pgx.ErrTxClosed) {
		return errors.Join(&commitbox.InputError{Field: "tx", Problem: "has ended; begin a new transaction"}, err)
	}
	return err
}

// CommitLost says whether an error of COMMIT leaves open whether it was done: it was sent, and neither refused nor answered.
func CommitLost(err error) bool {
	var pg *pgconn.PgError
	switch {
	case err == nil, pgconn.SafeToRetry(err), errors.Is(err, pgx.ErrTxClosed), errors.Is(err, pgx.ErrTxCommitRollback):
		return false
	case errors.As(err, &pg):
		severity := cmp.Or(pg.SeverityUnlocalized, pg.Severity)
		return severity == "FATAL" || severity == "PANIC" // the session ended, perhaps after the commit
	}
	return true
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
