package check_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
)

func TestText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		value    string
		required *commitbox.InputError // nil: accepted
		optional *commitbox.InputError
	}{
		{"a", nil, nil},
		{"abcd", nil, nil},
		{"éé", nil, nil},
		{"", &commitbox.InputError{Field: "F", Problem: "is empty", Limit: 4}, nil},
		{"abcde", tooLong(5), tooLong(5)},
		{"ééé", tooLong(6), tooLong(6)}, // bytes count, not characters
		{"a\x00b", nul(), nul()},
		{"a\xff", notUTF8(), notUTF8()},
		{"\xed\xa0\x80", notUTF8(), notUTF8()}, // half of a surrogate pair
	} {
		if diff := cmp.Diff(c.required, inputError(t, check.Text("F", c.value, 4))); diff != "" {
			t.Errorf("Text(%q) (-want +got):\n%s", c.value, diff)
		}
		if diff := cmp.Diff(c.optional, inputError(t, check.OptionalText("F", c.value, 4))); diff != "" {
			t.Errorf("OptionalText(%q) (-want +got):\n%s", c.value, diff)
		}
	}
}

func tooLong(size int) *commitbox.InputError {
	return &commitbox.InputError{Field: "F", Problem: "is too long", Size: size, Limit: 4}
}

func nul() *commitbox.InputError {
	return &commitbox.InputError{Field: "F", Problem: "contains a NUL byte"}
}

func notUTF8() *commitbox.InputError {
	return &commitbox.InputError{Field: "F", Problem: "is not valid UTF-8"}
}

// inputError returns nil for a nil error and fails on any other type.
func inputError(t *testing.T, err error) *commitbox.InputError {
	t.Helper()
	if err == nil {
		return nil
	}
	var input *commitbox.InputError
	if !errors.As(err, &input) {
		t.Fatalf("%v is a %T", err, err)
	}
	return input
}

func TestSize(t *testing.T) {
	t.Parallel()
	if err := check.Size("Payload", 10, 10); err != nil {
		t.Errorf("at the limit: %v", err)
	}
	want := &commitbox.InputError{Field: "Payload", Problem: "is too large", Size: 11, Limit: 10}
	if diff := cmp.Diff(want, inputError(t, check.Size("Payload", 11, 10))); diff != "" {
		t.Errorf("over the limit (-want +got):\n%s", diff)
	}
}

func TestTx(t *testing.T) {
	t.Parallel()
	if got := inputError(t, check.Tx(t.Context(), (*someTx)(nil))); got == nil || got.Field != "tx" {
		t.Errorf("a nil pointer: %v", got)
	}
	if got := inputError(t, check.Tx(t.Context(), nil)); got == nil || got.Field != "tx" {
		t.Errorf("no transaction: %v", got)
	}
	if err := check.Tx(t.Context(), someTx{}); err != nil {
		t.Errorf("a transaction: %v", err)
	}
}

// someTx is a transaction that is not of pgx.
type someTx struct{ pgx.Tx }

func (someTx) Conn() *pgx.Conn { return nil }

func (someTx) SendBatch(_ context.Context, b *pgx.Batch) pgx.BatchResults {
	return pgx.FailedBatchResults(b, errors.ErrUnsupported)
}

func TestEnded(t *testing.T) {
	t.Parallel()
	closed := fmt.Errorf("statement: %w", pgx.ErrTxClosed)
	err := check.Ended(closed)
	if got := inputError(t, err); got == nil || got.Field != "tx" || !errors.Is(err, pgx.ErrTxClosed) {
		t.Errorf("an ended transaction: %v", err)
	}
	other := errors.New("other")
	if got := check.Ended(other); got != other { //nolint:errorlint // the very same value is asked for
		t.Errorf("another error became %v", got)
	}
	if got := check.Ended(nil); got != nil {
		t.Errorf("no error became %v", got)
	}
}

func TestClean(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		text string
		max  int
		want string
	}{
		{"", 5, ""},
		{"plain", 5, "plain"},
		{"plainer", 5, "plain"},
		{"a\x00b", 9, "a\uFFFDb"},
		{"a\xff\xfeb", 9, "a\uFFFDb"},
		{"abé", 3, "ab"},
		{"abé", 4, "abé"},
		{"é", 1, ""},
		{"é", 0, ""},
		{strings.Repeat("\x00", 3), 7, "\uFFFD\uFFFD"},
	} {
		if got := check.Clean(c.text, c.max); got != c.want {
			t.Errorf("Clean(%q, %d) = %q, want %q", c.text, c.max, got, c.want)
		}
	}
}

// What Clean returns can be stored, and changes no text that could be stored before.
func FuzzClean(f *testing.F) {
	f.Add("a\x00\xffé", 4)
	f.Add("plain", 2048)
	f.Fuzz(func(t *testing.T, text string, max int) {
		if max < 0 {
			return
		}
		got := check.Clean(text, max)
		if check.OptionalText("F", got, max) != nil {
			t.Fatalf("Clean(%q, %d) = %q, which is refused", text, max, got)
		}
		if utf8.ValidString(text) && !strings.Contains(text, "\x00") && len(text) <= max && got != text {
			t.Fatalf("Clean(%q, %d) = %q", text, max, got)
		}
	})
}

func TestCommitLost(t *testing.T) {
	t.Parallel()
	for err, want := range map[error]bool{
		nil:                      false,
		pgx.ErrTxClosed:          false,
		pgx.ErrTxCommitRollback:  false,
		io.ErrUnexpectedEOF:      true,
		context.DeadlineExceeded: true, // while the answer was awaited
		&pgconn.PgError{Code: "23505", Severity: "ERROR", SeverityUnlocalized: "ERROR"}:  false,
		&pgconn.PgError{Code: "57P01", Severity: "SCHWER", SeverityUnlocalized: "FATAL"}: true,
		&pgconn.PgError{Code: "08P01", Severity: "FATAL"}:                                true,
	} {
		if got := check.CommitLost(err); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
}
