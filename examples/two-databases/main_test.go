package main

import (
	"bytes"
	"reflect"
	"strings"
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }

func TestB8_TwoDatabases(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := run(t.Context(), testenv.EmptyDatabase(t).URL, &out); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	t.Logf("\n%s", &out)
}

func TestRunNeedsADatabase(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"", "nonsense"} {
		if err := run(t.Context(), url, new(bytes.Buffer)); err == nil || !strings.Contains(err.Error(), "DATABASE_URL") {
			t.Error(err)
		}
	}
}

// An account is found where it was put, by every program and every version of it.
func TestB8_TheRouteIsFixed(t *testing.T) {
	t.Parallel()
	s := shards{{number: 1}, {number: 2}}
	route := ""
	for n := range accounts {
		route += string(rune('0' + s.of(name(n)).number))
	}
	if want := "21212121211212121212"; route != want {
		t.Errorf("the accounts are in %s, and were in %s", route, want)
	}
}

// TestMoneyIsCounted breaks the tables by hand.
func TestMoneyIsCounted(t *testing.T) {
	t.Parallel()
	s, err := open(t.Context(), testenv.EmptyDatabase(t).URL)
	t.Cleanup(func() {
		if err := s.drop(); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	here, there := name(0), name(1)
	for n := range accounts {
		if s.of(name(n)) != s.of(here) {
			there = name(n)
		}
	}
	exec := func(in *shard, sql string, args ...any) {
		t.Helper()
		if _, err := in.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	want := report{money: accounts * opening}
	for _, step := range []struct {
		what   string
		change func()
		want   func(*report)
	}{
		{"nothing", func() {}, func(*report) {}},
		{
			"paid and not credited", func() { exec(s.of(here), `insert into sent values ('t', $1, $2, 1)`, here, there) },
			func(r *report) { r.sent, r.crossed, r.lost = 1, 1, 1 },
		},
		{
			"credited", func() { exec(s.of(there), `insert into arrived values ('t', $1, 1)`, there) },
			func(r *report) { r.arrived, r.lost = 1, 0 },
		},
		{
			"credited again, in the wrong database", func() { exec(s.of(here), `insert into arrived values ('t', $1, 1)`, there) },
			func(r *report) { r.twice, r.misled = 1, 1 },
		},
		{
			"paid again", func() { exec(s.of(here), `insert into sent values ('t', $1, $2, 1)`, here, there) },
			func(r *report) { r.twice, r.crossed = 2, 2 },
		},
		{
			"money from nowhere", func() { exec(s.of(here), `update account set balance = balance + 1 where name = $1`, here) },
			func(r *report) { r.money++ },
		},
	} {
		step.change()
		step.want(&want)
		got, err := s.count(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got.databases = nil
		if !reflect.DeepEqual(*got, want) {
			t.Errorf("after %s: %+v, want %+v", step.what, *got, want)
		}
	}
}
