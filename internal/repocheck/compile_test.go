package repocheck

import (
	"strings"
	"testing"
)

// program is a file that calls one function of the library with an executor of the given type.
func program(executor, call string) string {
	return `package main

import (
	"context"
	"database/sql"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/outbox"
	"github.com/commitbox/commitbox/sqltx"
)

var (
	_ *sql.DB
	_ *pgxpool.Pool
	_ pgx.Tx
	_ inbox.ID
	_ outbox.Message
	_ sqltx.Tx
)

func use(ctx context.Context, executor ` + executor + `) {
	` + call + `
}

func main() {}
`
}

// calls take the transaction of the business change.
var calls = map[string]string{
	"outbox.Enqueue":      `_, _ = outbox.Enqueue(ctx, executor, outbox.Message{Topic: "t"})`,
	"inbox.MarkCompleted": `_ = inbox.MarkCompleted(ctx, executor, inbox.ID{}, inbox.Void{}, "reason")`,
	"inbox.Handle":        `_, _ = inbox.Handle(ctx, executor, inbox.ID{}, func(context.Context) (inbox.Void, error) { return inbox.Void{}, nil })`,
}

// compile builds a program and returns what the compiler says.
func compile(t *testing.T, text string) (messages string, err error) {
	t.Helper()
	dir := t.TempDir()
	writeFile(t, dir, "main.go", text)
	_, messages, err = goCommand(t, root, "build", "-o", dir+"/program", dir+"/main.go")
	return messages, err
}

func TestOnlyATransactionCompiles(t *testing.T) {
	t.Parallel()
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if messages, err := compile(t, program("pgx.Tx", call)); err != nil {
				t.Errorf("with a pgx.Tx it must compile: %v\n%s", err, messages)
			}
			for _, executor := range []string{"*pgxpool.Pool", "*pgxpool.Conn", "*pgx.Conn", "*sql.DB", "*sql.Tx"} {
				messages, err := compile(t, program(executor, call))
				if err == nil {
					t.Errorf("with a %s it must not compile", executor)
				} else if !strings.Contains(messages, "does not implement pgx.Tx") && !strings.Contains(messages, "as pgx.Tx value") {
					t.Errorf("with a %s it must fail because that is no pgx.Tx, not for this reason:\n%s", executor, messages)
				}
			}
		})
	}
}

// A *sql.DB has no end of a transaction, and a pgx.Tx needs no view.
func TestA5_OnlyATransactionOfDatabaseSQLHasAView(t *testing.T) {
	t.Parallel()
	const call = `_ = sqltx.From(executor)`
	for _, executor := range []string{"*sql.Tx", "sqltx.Tx"} {
		if messages, err := compile(t, program(executor, call)); err != nil {
			t.Errorf("with a %s it must compile: %v\n%s", executor, err, messages)
		}
	}
	for _, executor := range []string{"*sql.DB", "*sql.Conn", "*pgxpool.Pool", "pgx.Tx"} {
		messages, err := compile(t, program(executor, call))
		if err == nil {
			t.Errorf("with a %s it must not compile", executor)
		} else if !strings.Contains(messages, "does not implement sqltx.Tx") {
			t.Errorf("with a %s it must fail because that is no transaction, not for this reason:\n%s", executor, messages)
		}
	}
}
