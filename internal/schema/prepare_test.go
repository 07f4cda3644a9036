package schema_test

import (
	"testing"

	"github.com/commitbox/commitbox/internal/schema"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/migrate"
)

// PostgreSQL accepts every query as it is written and as it is rewritten, with a search path that leads nowhere.
func TestEveryQueryCanBePrepared(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	if err := migrate.Up(t.Context(), db.Pool, migrate.Config{Schema: "user"}); err != nil {
		t.Fatal(err)
	}
	conn, err := db.Pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	if _, err := conn.Exec(t.Context(), "set search_path = ''"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{schema.Default, "user"} {
		for _, sql := range queries(t) {
			if _, err := conn.Conn().PgConn().Prepare(t.Context(), "", parse(t, name).Rewrite(sql), nil); err != nil {
				t.Errorf("schema %s: %.200s\n%v", name, sql, err)
			}
		}
	}
}
