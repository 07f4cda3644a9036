package sqltx_test

import (
	"database/sql"
	"encoding/json"
	"errors"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/sqltx"
)

var (
	anID   = uuid.MustParse("0190aaaa-bbbb-7ccc-8ddd-eeeeffff0001")
	aTime  = time.Date(2024, 2, 29, 23, 59, 59, 123456000, time.FixedZone("", -9*3600))
	binary = []byte{0, 1, '\\', '\'', '"', 0xff, 0}
)

// What goes in comes out, as it does through pgx, for the types of the library's statements and others.
func TestValuesComeBack(t *testing.T) {
	_, view := begin(t, open(t))
	for _, c := range []struct {
		cast string
		in   any
	}{
		{"text", "a'b\\\"é"},
		{"text", ""},
		{"int8", int64(math.MinInt64)},
		{"int4", int32(-5)},
		{"int2", int16(7)},
		{"float8", 1.25},
		{"bool", true},
		{"bytea", binary},
		{"bytea", []byte{}},
		{"timestamptz", aTime},
		{"uuid", anID},
		{"uuid", pgtype.UUID{Bytes: anID, Valid: true}},
		{"uuid", pgtype.UUID{}},
		{"text", pgtype.Text{String: "x", Valid: true}},
		{"text", pgtype.Text{}},
		{"timestamptz", (*time.Time)(nil)},
		{"timestamptz", &aTime},
		{"jsonb", json.RawMessage(`{"a": 1}`)},
		{"jsonb", map[string]string{"a": "b"}},
		{"date", pgtype.Date{Time: time.Date(2024, 2, 29, 0, 0, 0, 0, time.UTC), Valid: true}},
		{"numeric", "12345678901234567890.5"},
		{"text[]", []string{"", "NULL", "a,b", `"\{}`, "é"}},
		{"text[]", []string(nil)},
		{"text[]", []string{}},
		{"bytea[]", [][]byte{binary, {}, nil}},
		{"uuid[]", []pgtype.UUID{{Bytes: anID, Valid: true}, {}}},
		{"uuid[]", []uuid.UUID{anID}},
		{"jsonb[]", [][]byte{[]byte(`{"a": "\""}`), []byte(`[]`)}},
		{"jsonb[]", []string{`{"a": "\""}`}},
		{"timestamp with time zone[]", []time.Time{aTime}},
		{"double precision[]", []float64{1.5, -2}},
		{"integer[]", []int{1, 2}},
		{"smallint[]", []int16{1, -2}},
		{"bigint[]", []int64{math.MaxInt64}},
	} {
		for _, statement := range []string{`select $1::` + c.cast, `select CAST ( $1 AS ` + c.cast + `)`} {
			got := reflect.New(reflect.TypeOf(c.in))
			if err := view.QueryRow(t.Context(), statement, c.in).Scan(got.Interface()); err != nil {
				t.Fatalf("%T, %s: %v", c.in, statement, err)
			}
			if diff := cmp.Diff(c.in, got.Elem().Interface()); diff != "" {
				t.Errorf("%T, %s:\n%s", c.in, statement, diff)
			}
		}
	}
}

func TestNilBytesAreNull(t *testing.T) {
	_, view := begin(t, open(t))
	if !one[bool](t, view, `select $1::bytea is null and $2::text[] is null`, []byte(nil), []string(nil)) {
		t.Error("not null")
	}
}

func TestOptionsOfPgx(t *testing.T) {
	_, view := begin(t, open(t))
	if got := one[int](t, view, `select $1::int + $2::int`, pgx.QueryExecModeExec, pgx.QueryResultFormats{1}, 1, 2); got != 3 {
		t.Error(got)
	}
	if got := one[string](t, view, `select @a::text || @b::text`, pgx.QueryExecModeSimpleProtocol, pgx.NamedArgs{"a": "x", "b": "y"}); got != "xy" {
		t.Error(got)
	}
}

func TestArgumentsThatCannotBeWrittenAreRefused(t *testing.T) {
	_, view := begin(t, open(t))
	_, err := view.Exec(t.Context(), `select $1::jsonb`, map[string]any{"a": "secret", "b": func() {}})
	if !errors.As(err, new(*commitbox.InputError)) || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
	if got := one[int](t, view, `select 1`); got != 1 {
		t.Error("something was sent")
	}
}

func TestRows(t *testing.T) {
	_, view := begin(t, open(t))
	rows, err := view.Query(t.Context(), `select g::int4 as n, 'x'::text as t, '\x00ff'::bytea as b, null::int8 as nothing, array['a']::text[] as list from generate_series(1, 3) g`)
	if err != nil {
		t.Fatal(err)
	}
	for i := int32(1); rows.Next(); i++ {
		values, err := rows.Values()
		if want := []any{i, "x", []byte{0, 0xff}, nil, []any{"a"}}; err != nil || !reflect.DeepEqual(values, want) {
			t.Errorf("%#v, %v", values, err)
		}
		if raw := rows.RawValues(); string(raw[1]) != "x" || raw[3] != nil {
			t.Errorf("%q", raw)
		}
		if err := rows.Scan(nil, new(string), nil, nil, nil); err != nil {
			t.Error(err)
		}
	}
	var oids []uint32
	for _, f := range rows.FieldDescriptions() {
		oids = append(oids, f.DataTypeOID)
	}
	if want := []uint32{pgtype.Int4OID, pgtype.TextOID, pgtype.ByteaOID, pgtype.Int8OID, pgtype.TextArrayOID}; !reflect.DeepEqual(oids, want) {
		t.Errorf("%v", oids)
	}
	if rows.Err() != nil || rows.CommandTag().RowsAffected() != 3 || rows.TypeMap() == nil || rows.Conn() != nil {
		t.Errorf("%v, %v", rows.Err(), rows.CommandTag())
	}
}

func TestRowsIntoStructs(t *testing.T) {
	_, view := begin(t, open(t))
	type pair struct {
		A int
		B *string
	}
	found, err := view.Query(t.Context(), `select 1 as a, null::text as b`)
	if err != nil {
		t.Fatal(err)
	}
	got, err := pgx.CollectExactlyOneRow(found, pgx.RowToStructByName[pair])
	if err != nil || got != (pair{A: 1}) {
		t.Errorf("%v, %v", got, err)
	}
}

func TestRowsThatFail(t *testing.T) {
	_, view := begin(t, open(t))
	for name, scan := range map[string]func() error{
		"no row":             func() error { return view.QueryRow(t.Context(), `select 1 where false`).Scan(new(int)) },
		"too few":            func() error { return view.QueryRow(t.Context(), `select 1, 2`).Scan(new(int)) },
		"another type":       func() error { return view.QueryRow(t.Context(), `select 'x'::text`).Scan(new(int)) },
		"null into a string": func() error { return view.QueryRow(t.Context(), `select null::text`).Scan(new(string)) },
	} {
		err := scan()
		if err == nil || errors.Is(err, pgx.ErrNoRows) != (name == "no row") {
			t.Errorf("%s: %v", name, err)
		}
	}
	rows, err := view.Query(t.Context(), `select 1 / (3 - g) from generate_series(1, 5) g`)
	for err == nil && rows.Next() {
	}
	if err == nil {
		err = rows.Err()
	}
	if err == nil || !strings.Contains(err.Error(), "division by zero") {
		t.Errorf("an error behind the first row: %v", err)
	}
}

// An enum and a domain have no name that pgx knows; they are read as text.
func TestTypesOfTheUser(t *testing.T) {
	_, view := begin(t, open(t))
	exec(t, view, `create type mood as enum ('glad', 'sad')`)
	exec(t, view, `create domain small as int`)
	type feeling string
	if got := one[string](t, view, `select $1::mood`, "sad"); got != "sad" {
		t.Error(got)
	}
	if got := one[string](t, view, `select $1::mood`, feeling("glad")); got != "glad" {
		t.Error(got)
	}
	if got := one[int](t, view, `select 4::small`); got != 4 {
		t.Error(got)
	}
}

var _ sqltx.Tx = (*sql.Tx)(nil)
