package flowtest_test

import (
	"context"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"

	"github.com/commitbox/commitbox/internal/testenv"
)

// TestReadmeStatements runs what the README tells an operator to type, on a database where there is nothing to settle.
func TestReadmeStatements(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	statements := regexp.MustCompile("`(select [^`]+)`").FindAllStringSubmatch(string(text), -1)
	if len(statements) < 10 {
		t.Errorf("the README has %d statements", len(statements))
	}
	db := testenv.Database(t)
	for _, s := range statements {
		statement := strings.NewReplacer("<message id>", uuid.NewString(), "<key>", "k").Replace(s[1])
		if _, err := db.Pool.Exec(context.Background(), statement); err != nil {
			t.Errorf("%s: %v", s[1], err)
		}
	}
}
