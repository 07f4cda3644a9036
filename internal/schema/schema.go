// Package schema moves every statement of commitbox into the schema that the user chose.
//
// The statements in queries/ and migrations/ name the schema commitbox. A [Name] rewrites that word, wherever it stands
// alone, into the chosen name in double quotes: as a qualifier, inside regclass literals, in function bodies and in DDL.
// The name is always quoted, so that reserved words work; the statements write commitbox without quotes.
package schema

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Default is the schema that the statements name.
const Default = "commitbox"

// ErrName says that a schema name is not accepted. It is matched with errors.Is.
var ErrName = errors.New("schema name must match ^[a-z_][a-z0-9_]{0,47}$ and must not begin with pg_")

var namePattern = regexp.MustCompile(`^[a-z_][a-z0-9_]{0,47}$`)

// Name is a checked schema name. The zero value stands for [Default]. Names are compared with ==.
type Name struct{ name string }

// Parse checks a schema name. An empty one is [Default].
func Parse(name string) (Name, error) {
	if name == "" || name == Default {
		return Name{}, nil
	}
	if !namePattern.MatchString(name) || strings.HasPrefix(name, "pg_") {
		return Name{}, fmt.Errorf("%w: %q", ErrName, name)
	}
	return Name{name}, nil
}

// String returns the bare name.
func (n Name) String() string {
	if n.name == "" {
		return Default
	}
	return n.name
}

// Qualify returns an object of the schema as a quoted identifier that fits into SQL text and regclass literals.
func (n Name) Qualify(object string) string {
	return pgx.Identifier{n.String()}.Sanitize() + "." + object
}

// Rewrite returns the statement with the chosen schema. A statement is rewritten once and kept, so it must be one of a
// bounded number of texts.
func (n Name) Rewrite(sql string) string {
	if n.name == "" {
		return sql
	}
	key := rewriteKey{n, sql}
	if text, ok := rewritten.Load(key); ok {
		return text.(string)
	}
	text, _ := rewritten.LoadOrStore(key, n.rewrite(sql))
	return text.(string)
}

// rewritten holds what Rewrite has made. The texts are constants of this module, so it stays small.
var rewritten sync.Map

type rewriteKey struct {
	schema Name
	sql    string
}

func (n Name) rewrite(sql string) string {
	if n.name == "" {
		return sql
	}
	quoted := pgx.Identifier{n.name}.Sanitize()
	var out strings.Builder
	for at := 0; ; {
		i := strings.Index(sql[at:], Default)
		if i < 0 {
			out.WriteString(sql[at:])
			return out.String()
		}
		start, end := at+i, at+i+len(Default)
		out.WriteString(sql[at:start])
		if standsAlone(sql, start, end) {
			out.WriteString(quoted)
		} else {
			out.WriteString(Default)
		}
		at = end
	}
}

// standsAlone says whether the word sql[start:end] is not part of a longer identifier.
func standsAlone(sql string, start, end int) bool {
	return (start == 0 || !identifierByte(sql[start-1])) && (end == len(sql) || !identifierByte(sql[end]))
}

func identifierByte(b byte) bool {
	return b == '_' || b == '$' || b >= '0' && b <= '9' || b >= 'a' && b <= 'z' || b >= 'A' && b <= 'Z' || b >= 0x80
}

// Executor is what statements run on: a transaction, a connection or a pool.
type Executor interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// On returns an executor that rewrites every statement before it reaches e.
func (n Name) On(e Executor) Executor {
	if n.name == "" {
		return e
	}
	return rewriter{n, e}
}

type rewriter struct {
	schema Name
	on     Executor
}

func (r rewriter) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return r.on.Exec(ctx, r.schema.Rewrite(sql), args...)
}

func (r rewriter) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return r.on.Query(ctx, r.schema.Rewrite(sql), args...)
}

func (r rewriter) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return r.on.QueryRow(ctx, r.schema.Rewrite(sql), args...)
}
