package sqltx

import (
	"database/sql"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// translate gives an error of database/sql or of a driver the form that pgx's has, and keeps it.
func translate(err error) error {
	switch {
	case err == nil, errors.As(err, new(*pgconn.PgError)):
		return err
	case errors.Is(err, sql.ErrTxDone):
		return fmt.Errorf("%w: %w", pgx.ErrTxClosed, err)
	}
	if pg := serverError(err); pg != nil {
		return &driverError{err, pg}
	}
	return err
}

// driverError is an error that PostgreSQL answered through a driver other than pgx.
type driverError struct {
	cause error
	pg    *pgconn.PgError
}

func (e *driverError) Error() string   { return e.cause.Error() }
func (e *driverError) Unwrap() []error { return []error{e.cause, e.pg} }

// serverError reads the fields of an error by the letters of PostgreSQL's protocol, under the method names of lib/pq and of
// pgdriver, or its SQLSTATE alone.
func serverError(err error) *pgconn.PgError {
	var (
		byGet   interface{ Get(field byte) string }
		byField interface{ Field(field byte) string }
		state   interface{ SQLState() string }
		field   func(byte) string
	)
	switch {
	case errors.As(err, &byGet):
		field = byGet.Get
	case errors.As(err, &byField):
		field = byField.Field
	case errors.As(err, &state):
		return &pgconn.PgError{Code: state.SQLState(), Message: err.Error()}
	default:
		return nil
	}
	if field('C') == "" {
		return nil
	}
	return &pgconn.PgError{
		Severity: field('S'), Code: field('C'), Message: field('M'), Detail: field('D'), Hint: field('H'), Where: field('W'),
		SchemaName: field('s'), TableName: field('t'), ColumnName: field('c'), DataTypeName: field('d'), ConstraintName: field('n'),
	}
}
