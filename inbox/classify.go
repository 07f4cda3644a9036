package inbox

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/debug"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/internal/check"
)

// The SQLSTATEs that the package branches on.
const (
	stateSerialization   = "40001"
	stateDeadlock        = "40P01"
	stateReadOnly        = "25006"
	stateLockTimeout     = "55P03"
	stateOutOfMemory     = "53200"
	stateForeignKey      = "23503"
	stateUniqueViolation = "23505"
	stateCursorExists    = "42P03"
	statePreparedExists  = "42P05"
)

// sqlState returns what PostgreSQL answered, through pgx or through another driver, in which the handler has written.
func sqlState(err error) string {
	var pg interface{ SQLState() string }
	if errors.As(err, &pg) {
		return pg.SQLState()
	}
	return ""
}

// conflict says that the transaction lost against others and may win if it runs again.
func conflict(err error) bool {
	code := sqlState(err)
	return code == stateSerialization || code == stateDeadlock
}

// transient says that an error tells of the store's state and not of the message: it never counts as an attempt. The end
// of a context does not, although pgx calls what it kept from being sent safe to retry.
func transient(err error) bool {
	if code := sqlState(err); code != "" {
		return conflict(err) || code == stateReadOnly || strings.HasPrefix(code, "08") || strings.HasPrefix(code, "53") || strings.HasPrefix(code, "57P0")
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	return pgconn.SafeToRetry(err) || errors.Is(err, pgconn.ErrConnClosed) || errors.Is(err, driver.ErrBadConn)
}

// uncounted says that a handler failed because of the store and not because of the message. A closed connection alone
// does not say so: a context of the handler's own closes it too. What does is PostgreSQL's answer or a network's error in
// the handler's error. With the caller's deadline passed, only PostgreSQL's answer does; a caller who cancels in the middle
// of a statement stops, which is nobody's failure.
func uncounted(ctx context.Context, state txState, cause error) bool {
	switch {
	case sqlState(cause) != "":
		return transient(cause)
	case ctx.Err() != nil:
		return state == stateClosed && errors.Is(ctx.Err(), context.Canceled)
	}
	return transient(cause) || state == stateClosed && cut(cause)
}

// cut says that an error tells of a connection that was cut from the other side.
func cut(err error) bool {
	var network *net.OpError
	return errors.As(err, &network) && !network.Timeout() || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF)
}

// permanent is the default of Config.IsPermanent.
func permanent(err error) bool {
	code := sqlState(err)
	switch code {
	case stateForeignKey, stateUniqueViolation: // may be gone when other transactions have committed
		return false
	case stateCursorExists, statePreparedExists: // the mode of a pooler, which meets every message
		return false
	}
	return strings.HasPrefix(code, "22") || strings.HasPrefix(code, "23") || strings.HasPrefix(code, "42")
}

// sound returns err, or the panic of its methods: a typed nil pointer, for example, cannot be told. What it returns can
// be looked at without a recover.
func sound(err error) (checked error) {
	defer func() {
		if value := recover(); value != nil {
			checked = &PanicError{Value: value, Stack: debug.Stack()}
		}
	}()
	if err != nil {
		_ = err.Error()
		_ = errors.Is(err, errUnwound)
		_ = sqlState(err)
	}
	return err
}

const errorLenMax = 4096

// describe returns the text of an error that a row keeps. PostgreSQL's errors are told by state, table, column and
// constraint; the message text of data exceptions quotes the value and is left out.
func describe(err error) string {
	text := err.Error()
	var pg *pgconn.PgError
	switch isPg, state := errors.As(err, &pg), sqlState(err); {
	case isPg:
		if strings.HasPrefix(pg.Code, "22") {
			text = strings.ReplaceAll(text, pg.Message, "invalid data")
		}
		text += place(pg)
	case strings.HasPrefix(state, "22"): // of another driver, which has its own ways of writing it
		text = "invalid data (SQLSTATE " + state + ")"
	}
	return check.Clean(text, errorLenMax)
}

func place(pg *pgconn.PgError) string {
	var parts []string
	for _, p := range [...]struct{ name, value string }{{"table", pg.TableName}, {"column", pg.ColumnName}, {"constraint", pg.ConstraintName}} {
		if p.value != "" {
			parts = append(parts, p.name+" "+p.value)
		}
	}
	if len(parts) == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s)", strings.Join(parts, ", "))
}
