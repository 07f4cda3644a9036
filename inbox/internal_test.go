package inbox

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox/internal/db"
)

// F14: what lock and row mean together.
func TestF14_Decide(t *testing.T) {
	s := mustSettings(Config{MaxAttempts: 3})
	ignore := mustSettings(Config{MaxAttempts: 3, IgnoreDue: true})
	a, b := FingerprintOf([]byte("a")), FingerprintOf([]byte("b"))
	for _, c := range []struct {
		name    string
		s       *settings
		row     db.InboxLookRow
		print   []byte
		outcome Outcome
		step    step
	}{
		{"completed", s, db.InboxLookRow{Mine: true, Status: "completed"}, nil, Replayed, stepAnswer},
		{"completed, not mine", s, db.InboxLookRow{Status: "completed"}, nil, Replayed, stepAnswer},
		{"completed, same print", s, db.InboxLookRow{Status: "completed", Fingerprint: a}, a, Replayed, stepAnswer},
		{"completed, other print", s, db.InboxLookRow{Status: "completed", Fingerprint: a}, b, Mismatch, stepAnswer},
		{"completed, other algorithm", s, db.InboxLookRow{Status: "completed", Fingerprint: a}, []byte{2, 1}, Replayed, stepAnswer},
		{"completed, no print", s, db.InboxLookRow{Status: "completed", Fingerprint: a}, nil, Replayed, stepAnswer},
		{"failed, other print", s, db.InboxLookRow{Mine: true, Status: "failed", Fingerprint: a}, b, Mismatch, stepAnswer},
		{"dead", s, db.InboxLookRow{Mine: true, Status: "dead"}, nil, Dead, stepAnswer},
		{"dead, not mine", s, db.InboxLookRow{Status: "dead"}, nil, Dead, stepAnswer},
		{"no row, not mine", s, db.InboxLookRow{}, nil, InProgress, stepAnswer},
		{"no row, mine", s, db.InboxLookRow{Mine: true}, nil, Executed, stepClaim},
		{"failed, not mine", s, db.InboxLookRow{Status: "failed", Attempts: 1}, nil, InProgress, stepAnswer},
		{"failed, due", s, db.InboxLookRow{Mine: true, Status: "failed", Attempts: 1}, nil, Executed, stepTakeover},
		{"failed, not due", s, db.InboxLookRow{Mine: true, Status: "failed", Attempts: 1, DueIn: 2}, nil, NotDue, stepAnswer},
		{"failed, not due, ignored", ignore, db.InboxLookRow{Mine: true, Status: "failed", Attempts: 1, DueIn: 2}, nil, Executed, stepTakeover},
		{"failed, used up", s, db.InboxLookRow{Mine: true, Status: "failed", Attempts: 3}, nil, Executed, stepBury},
		{"leased", s, db.InboxLookRow{Mine: true, Status: "pending", Attempts: 1, DueIn: 2}, nil, InProgress, stepAnswer},
		{"leased, expired", s, db.InboxLookRow{Mine: true, Status: "pending", Attempts: 1, DueIn: -2}, nil, InProgress, stepTakeover},
		{"leased, expired, not mine", s, db.InboxLookRow{Status: "pending", Attempts: 1, DueIn: -2}, nil, InProgress, stepAnswer},
		{"leased, expired, steps", s, db.InboxLookRow{Mine: true, Status: "pending", Attempts: 1, DueIn: -2, HasSteps: true}, nil, InProgress, stepAnswer},
		{"leased, expired, used up", s, db.InboxLookRow{Mine: true, Status: "pending", Attempts: 3, DueIn: -2}, nil, InProgress, stepAnswer},
	} {
		v, next := c.s.decide(c.row, c.print)
		if next != c.step || next == stepAnswer && v.outcome != c.outcome {
			t.Errorf("%s: %v, step %d", c.name, v.outcome, next)
		}
		if v.outcome == NotDue && v.after != 2*time.Second {
			t.Errorf("%s: wait %v", c.name, v.after)
		}
	}
}

func TestB11_Classification(t *testing.T) {
	for code, want := range map[string]string{
		"40001": "transient", "40P01": "transient", "08006": "transient", "53300": "transient", "57P01": "transient", "57P03": "transient", "25006": "transient",
		"22001": "permanent", "22P02": "permanent", "23502": "permanent", "23514": "permanent", "42P01": "permanent",
		"23503": "counted", "23505": "counted", "P0001": "counted", "42P05": "counted", "42P03": "counted", "26000": "counted", "42501": "permanent", "57014": "counted", "55P03": "counted",
	} {
		err := fmt.Errorf("handler: %w", &pgconn.PgError{Code: code})
		got := "counted"
		switch {
		case transient(err):
			got = "transient"
		case mustSettings(Config{}).limitFor(err) == 1:
			got = "permanent"
		}
		if got != want {
			t.Errorf("%s is %s, want %s", code, got, want)
		}
	}
	if mustSettings(Config{}).limitFor(fmt.Errorf("x: %w", Permanent(errors.New("no")))) != 1 {
		t.Error("Permanent is not permanent")
	}
}

func TestDescribe(t *testing.T) {
	err := fmt.Errorf("store: %w", &pgconn.PgError{Severity: "ERROR", Code: "22P02", Message: `invalid input syntax for type integer: "secret"`, TableName: "orders", ColumnName: "n"})
	if got := describe(err); strings.Contains(got, "secret") || !strings.Contains(got, "22P02") || !strings.Contains(got, "(table orders, column n)") {
		t.Errorf("got %q", got)
	}
	if got := describe(errors.New(strings.Repeat("é", 5000))); len(got) > errorLenMax || !strings.HasSuffix(got, "é") {
		t.Errorf("%d bytes, ends in %q", len(got), got[len(got)-3:])
	}
}

type versioned struct{ A int }

func (versioned) ResultVersion() byte { return 2 }

func TestF30_Codec(t *testing.T) {
	check := func(name string, err error) {
		t.Helper()
		if !errors.Is(err, ErrNoResult) {
			t.Errorf("%s: %v", name, err)
		}
	}
	stored, err := encode(versioned{4}, 100)
	if got, err2 := decode[versioned](stored); err != nil || err2 != nil || got.A != 4 {
		t.Errorf("versioned: %v %v %v", got, err, err2)
	}
	stored[1] = 1
	_, err = decode[versioned](stored)
	check("older version", err)
	_, err = decode[map[string]int](stored)
	check("versioned into plain", err)
	_, err = decode[int](nil)
	check("no result", err)
	_, err = decode[int]([]byte{9, '1'})
	check("unknown codec", err)
	_, err = decode[int]([]byte{codecJSON, '{'})
	check("broken", err)
	if _, err := decode[Void](nil); err != nil {
		t.Errorf("void: %v", err)
	}
	raw, _ := encode([]byte{0, 255}, 2)
	if got, err := decode[[]byte](raw); err != nil || string(got) != "\x00\xff" {
		t.Errorf("bytes: %v %v", got, err)
	}
	if _, err := encode([]byte{1, 2, 3}, 2); err == nil {
		t.Error("a result over the limit was taken")
	}
	if stored, err := encode(Void{}, 1); stored != nil || err != nil {
		t.Errorf("void is stored as %v, %v", stored, err)
	}
	null, err := encode[*int](nil, 10)
	if got, err2 := decode[*int](null); err != nil || err2 != nil || got != nil {
		t.Errorf("null: %v %v %v", got, err, err2)
	}
}

func TestConfigNamesEveryBadField(t *testing.T) {
	_, err := New(nil, Config{Schema: "pg_x", MaxAttempts: -1, MaxDeliveries: -1, BackoffBase: -1, BackoffMax: -2, ResultMax: -1, Wait: -1, CommitWait: -1})
	for _, field := range []string{"pool", "Schema", "MaxAttempts", "MaxDeliveries", "BackoffBase", "BackoffMax", "ResultMax", "Wait", "CommitWait"} {
		if err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s is not named in %v", field, err)
		}
	}
}

func TestRoundTripsKeepPositions(t *testing.T) {
	values := []Void{{}, {}}
	if stored, err := roundTrips(values, 10); stored != nil || err != nil {
		t.Errorf("void is stored as %v, %v", stored, err)
	}
	stored, err := roundTrips([]*int{nil, new(int)}, 10)
	if err != nil || len(stored) != 2 || string(stored[0][1:]) != "null" || string(stored[1][1:]) != "0" {
		t.Errorf("got %q, %v", stored, err)
	}
}
