package sqltx

import (
	"context"
	"database/sql/driver"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/commitbox/commitbox"
)

// bind takes the options of pgx away and gives the arguments a form that every driver of database/sql takes.
func (v view) bind(ctx context.Context, sql string, args []any) (string, []any, error) {
	if v.closed() {
		return "", nil, pgx.ErrTxClosed
	}
	sql, args, err := withoutOptions(ctx, sql, args)
	if err != nil {
		return "", nil, err
	}
	var types *pgtype.Map
	bound := make([]any, len(args))
	for i, arg := range args {
		if isPlain(arg) {
			bound[i] = arg
			continue
		}
		if types == nil {
			types = pgtype.NewMap()
		}
		if bound[i], err = bindOne(types, arg, castOf(sql, i+1)); err != nil {
			return "", nil, &commitbox.InputError{Field: "args[" + strconv.Itoa(i) + "]", Problem: fmt.Sprintf("is a %T that cannot be written as PostgreSQL's text", arg)}
		}
	}
	return sql, bound, nil
}

func withoutOptions(ctx context.Context, sql string, args []any) (string, []any, error) {
	var rewriter pgx.QueryRewriter
	for ; len(args) > 0; args = args[1:] {
		switch option := args[0].(type) {
		case pgx.QueryExecMode, pgx.QueryResultFormats, pgx.QueryResultFormatsByOID:
			continue
		case pgx.QueryRewriter:
			rewriter = option
			continue
		}
		break
	}
	if rewriter == nil {
		return sql, args, nil
	}
	return rewriter.RewriteQuery(ctx, nil, sql, args)
}

// isPlain says that a value is one of database/sql's own, or makes itself one.
func isPlain(arg any) bool {
	switch arg.(type) {
	case nil, time.Time, *time.Time, driver.Valuer:
		return true
	}
	t := reflect.TypeOf(arg)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.Slice, reflect.Array, reflect.Map, reflect.Struct:
		return false
	}
	return true
}

// bindOne writes a value as text of the type that it is cast to, or else of the type that pgx takes it for. Bytes stay bytes,
// unless they are cast to another type, where they are that type's text. What has no known type is left to the driver.
func bindOne(types *pgtype.Map, arg any, cast string) (any, error) {
	t, known := types.TypeForName(cast)
	if value := reflect.ValueOf(arg); value.Kind() == reflect.Slice && value.Type().Elem().Kind() == reflect.Uint8 {
		switch {
		case value.IsNil():
			return nil, nil // a driver may take nil bytes for empty ones
		case !known || t.OID == pgtype.ByteaOID:
			return value.Bytes(), nil
		}
		return string(value.Bytes()), nil
	}
	if !known {
		if t, known = types.TypeForValue(arg); !known {
			return arg, nil
		}
	}
	text, err := types.Encode(t.OID, pgx.TextFormatCode, arg, nil)
	if err != nil || text == nil {
		return nil, err
	}
	return string(text), nil
}

// castOf returns pgx's name of the type to which the n-th parameter is cast where it stands first with a cast, as $1::type or
// else as cast($1 as type); empty if there is none.
func castOf(sql string, n int) string {
	number := strconv.Itoa(n)
	_, after, found := strings.Cut(sql, "$"+number+"::")
	if !found {
		casts := longCast.FindAllStringSubmatchIndex(sql, -1)
		i := slices.IndexFunc(casts, func(at []int) bool { return sql[at[2]:at[3]] == number })
		if i < 0 {
			return ""
		}
		after = sql[casts[i][1]:]
	}
	end := 0
	for end < len(after) && (after[end] == '_' || after[end] >= '0' && after[end] <= '9' || after[end]|0x20 >= 'a' && after[end]|0x20 <= 'z') {
		end++
	}
	name, after := strings.ToLower(after[:end]), strings.ToLower(after[end:])
	for _, long := range longNames {
		if rest, ok := strings.CutPrefix(after, long.second); ok && name == long.first {
			name, after = long.name, rest
			break
		}
	}
	if strings.HasPrefix(strings.TrimLeft(after, " "), "[]") {
		return "_" + name
	}
	return name
}

// longCast finds "cast($1 as ".
var longCast = regexp.MustCompile(`(?i)\bcast\s*\(\s*\$(\d+)\s+as\s+`)

// longNames are the names of types in standard SQL. The longer ones come first.
var longNames = [...]struct{ first, second, name string }{
	{"timestamp", " with time zone", "timestamptz"},
	{"timestamp", " without time zone", "timestamp"},
	{"double", " precision", "float8"},
	{"character", " varying", "varchar"},
	{"smallint", "", "int2"},
	{"integer", "", "int4"},
	{"int", "", "int4"},
	{"bigint", "", "int8"},
	{"real", "", "float4"},
	{"decimal", "", "numeric"},
	{"boolean", "", "bool"},
}
