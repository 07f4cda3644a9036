package sqltx

import (
	"database/sql"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// rows are the rows of database/sql as if PostgreSQL had sent them as text, and bytea as bytes.
type rows struct {
	from   *sql.Rows // nil: closed from the start
	types  *pgtype.Map
	fields []pgconn.FieldDescription
	raw    [][]byte
	count  int64
	err    error
}

// newRows takes the rows over. On an error it closes them.
func newRows(from *sql.Rows) (*rows, error) {
	r := &rows{from: from, types: pgtype.NewMap()}
	columns, err := from.ColumnTypes()
	if err != nil {
		return r, r.fail(err)
	}
	r.fields = make([]pgconn.FieldDescription, len(columns))
	for i, c := range columns {
		r.fields[i] = pgconn.FieldDescription{Name: c.Name(), DataTypeOID: oidOf(r.types, c.DatabaseTypeName())}
		if r.fields[i].DataTypeOID == pgtype.ByteaOID {
			r.fields[i].Format = pgx.BinaryFormatCode
		}
	}
	return r, nil
}

// oidOf finds a type by the name that a driver gives, which may be the number; 0 is unknown.
func oidOf(types *pgtype.Map, name string) uint32 {
	if t, ok := types.TypeForName(strings.ToLower(name)); ok {
		return t.OID
	}
	oid, _ := strconv.ParseUint(name, 10, 32) // 0 if it is no number
	return uint32(oid)
}

func (r *rows) Next() bool {
	if r.from == nil || r.err != nil {
		return false
	}
	if !r.from.Next() {
		r.Close()
		return false
	}
	r.count++
	return r.fail(r.read()) == nil
}

// read takes the values of the current row as the driver made them and turns them into text.
func (r *rows) read() error {
	values, into := make([]any, len(r.fields)), make([]any, len(r.fields))
	for i := range values {
		into[i] = &values[i]
	}
	if err := r.from.Scan(into...); err != nil {
		return err
	}
	r.raw = make([][]byte, len(values))
	for i, value := range values {
		text, err := r.text(r.fields[i].DataTypeOID, value)
		if err != nil {
			return fmt.Errorf("sqltx: column %s: %w", r.fields[i].Name, err)
		}
		r.raw[i] = text
	}
	return nil
}

func (r *rows) text(oid uint32, value any) ([]byte, error) {
	switch v := value.(type) {
	case nil:
		return nil, nil
	case []byte:
		return v, nil
	case string:
		return []byte(v), nil
	}
	if oid == 0 {
		if t, ok := r.types.TypeForValue(value); ok {
			oid = t.OID
		}
	}
	return r.types.Encode(oid, pgx.TextFormatCode, value, []byte{})
}

func (r *rows) Scan(dest ...any) error {
	if r.raw == nil {
		return r.fail(errors.New("sqltx: Scan without a row"))
	}
	if len(dest) == 1 {
		if whole, ok := dest[0].(pgx.RowScanner); ok {
			return r.fail(whole.ScanRow(r))
		}
	}
	if len(dest) != len(r.raw) {
		return r.fail(fmt.Errorf("sqltx: the row has %d columns, and there are %d destinations", len(r.raw), len(dest)))
	}
	for i, into := range dest {
		f := &r.fields[i]
		if err := r.types.Scan(f.DataTypeOID, f.Format, r.raw[i], into); err != nil {
			return r.fail(pgx.ScanArgError{ColumnIndex: i, FieldName: f.Name, Err: err})
		}
	}
	return nil
}

func (r *rows) Values() ([]any, error) {
	if r.raw == nil {
		return nil, r.fail(errors.New("sqltx: Values without a row"))
	}
	values := make([]any, len(r.raw))
	for i, raw := range r.raw {
		f := &r.fields[i]
		t, known := r.types.TypeForOID(f.DataTypeOID)
		switch {
		case raw == nil:
		case !known:
			values[i] = string(raw)
		default:
			value, err := t.Codec.DecodeValue(r.types, f.DataTypeOID, f.Format, raw)
			if err != nil {
				return nil, r.fail(err)
			}
			values[i] = value
		}
	}
	return values, nil
}

// fail keeps the first error and closes the rows.
func (r *rows) fail(err error) error {
	if err != nil && r.err == nil {
		r.err = translate(err)
		r.Close()
	}
	return err
}

// Close is safe to be called again. Only then is known whether the statement has succeeded.
func (r *rows) Close() {
	r.raw = nil
	if r.from == nil {
		return
	}
	err := errors.Join(r.from.Err(), r.from.Close())
	r.from = nil
	if r.err == nil {
		r.err = translate(err)
	}
}

func (r *rows) Err() error                                   { return r.err }
func (r *rows) CommandTag() pgconn.CommandTag                { return tag(r.count) }
func (r *rows) FieldDescriptions() []pgconn.FieldDescription { return r.fields }
func (r *rows) RawValues() [][]byte                          { return r.raw }
func (r *rows) TypeMap() *pgtype.Map                         { return r.types }
func (r *rows) Conn() *pgx.Conn                              { return nil }
