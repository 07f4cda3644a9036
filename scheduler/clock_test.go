package scheduler

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/testenv"
)

// shifted returns a database whose clock is off by what shift was given last.
func shifted(t *testing.T) (db *testenv.DB, shift func(time.Duration)) {
	t.Helper()
	db = testenv.Database(t)
	exec(t, db, "create schema fake")
	exec(t, db, "create table fake.shift (by interval)")
	exec(t, db, "insert into fake.shift values ('0')")
	exec(t, db, `create function fake.clock_timestamp() returns timestamptz language sql as 'select pg_catalog.clock_timestamp() + by from fake.shift'`)
	cfg := db.Pool.Config()
	cfg.ConnConfig.RuntimeParams["search_path"] = "fake, pg_catalog" // before pg_catalog, so the statements' clock is this one
	pool, err := pgxpool.NewWithConfig(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return &testenv.DB{Name: db.Name, URL: db.URL, Pool: pool}, func(by time.Duration) {
		exec(t, db, "update fake.shift set by = make_interval(secs => $1)", by.Seconds())
	}
}

// Ticks, leases and outcomes go by the database's clock, a day away from the process's either way.
func TestB69_TheClockOfTheProcessIsADayOff(t *testing.T) {
	t.Parallel()
	for _, off := range []time.Duration{24 * time.Hour, -24 * time.Hour} {
		t.Run(off.String(), func(t *testing.T) {
			t.Parallel()
			db, shift := shifted(t)
			shift(off)
			var mu sync.Mutex
			var ticks []time.Time
			s, stop := running(t, db, quiet(), Job{Name: "j", Spec: "@every 200ms", Run: func(_ context.Context, tick Tick) error {
				mu.Lock()
				defer mu.Unlock()
				ticks = append(ticks, tick.At)
				return nil
			}}, Job{Name: "long", Spec: "@every 200ms", Run: func(ctx context.Context, _ Tick) error {
				sleep(ctx, 1500*time.Millisecond) // longer than its lease
				return ctx.Err()
			}})
			start := time.Now()
			eventually(t, "five ticks", func() bool {
				mu.Lock()
				defer mu.Unlock()
				return len(ticks) >= 5
			})
			if took := time.Since(start); took < time.Second {
				t.Errorf("five ticks in %v", took)
			}
			eventually(t, "a run longer than its lease", func() bool { return !statusOf(t, s, "long").SucceededAt.IsZero() })
			if err := stop(); err != nil {
				t.Error(err)
			}
			for _, at := range append(ticks, statusOf(t, s, "j").StartedAt, statusOf(t, s, "j").FinishedAt) {
				if d := time.Until(at.Add(-off)); d > time.Minute || d < -time.Minute {
					t.Errorf("%v is not in the database's time", at)
				}
			}
			if got := statusOf(t, s, "long"); got.Failures != 0 {
				t.Errorf("%+v", got)
			}
		})
	}
}

// A clock that leaps ahead by weeks makes ticks due; when it comes back the timetable does too.
func TestTheDatabasesClockLeapsAndComesBack(t *testing.T) {
	t.Parallel()
	db, shift := shifted(t)
	var runs atomic.Int64
	e := replica(t, db, quiet(), Job{Name: "j", Spec: "* * * * *", CatchUp: true, Run: counting(&runs)})
	e.step(t)
	shift(21 * 24 * time.Hour)
	e.step(t)
	e.step(t)
	if runs.Load() != 1 {
		t.Errorf("%d runs after the leap", runs.Load())
	}
	shift(0)
	e.step(t)
	if next := time.Until(statusOf(t, e.Scheduler, "j").NextAt); next > 2*time.Minute || runs.Load() != 1 {
		t.Errorf("the next tick is in %v, %d runs", next, runs.Load())
	}
}

// Statements get no time but timetables, which are worked out from times that the database has answered.
func TestB69_NoStatementIsGivenTheTimeOfTheProcess(t *testing.T) {
	t.Parallel()
	allowed := []string{"claim: sent", "do: start", "keep: sent"} // measure waits of this process
	var found []string
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") || strings.HasPrefix(name, "cleanup") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, decl := range file.Decls {
			found = append(found, nows(decl)...)
		}
	}
	slices.Sort(found)
	if diff := cmp.Diff(allowed, found); diff != "" {
		t.Errorf("uses of time.Now (-want +got):\n%s", diff)
	}
}

// nows lists the variables of a function that are set from time.Now.
func nows(decl ast.Decl) (list []string) {
	fn, ok := decl.(*ast.FuncDecl)
	if !ok {
		return nil
	}
	variables := map[ast.Expr]string{}
	ast.Inspect(fn, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.AssignStmt:
			if id, ok := n.Lhs[0].(*ast.Ident); ok {
				variables[n.Rhs[0]] = id.Name
			}
		case *ast.CallExpr:
			if sel, ok := n.Fun.(*ast.SelectorExpr); ok && sel.Sel.Name == "Now" {
				list = append(list, fn.Name.Name+": "+variables[n])
			}
		}
		return true
	})
	return list
}

// The clock that goes off in the middle of a run: the run is told that its lease has ended.
func TestALeapDuringARun(t *testing.T) {
	t.Parallel()
	db, shift := shifted(t)
	cause, started := make(chan error, 1), make(chan struct{})
	e := replica(t, db, quiet(), Job{Name: "j", Spec: yearly, Run: func(ctx context.Context, _ Tick) error {
		close(started)
		<-ctx.Done()
		cause <- context.Cause(ctx)
		return ctx.Err()
	}})
	e.step(t)
	due(t, db, "j", 0)
	if _, err := e.look(t.Context()); err != nil {
		t.Fatal(err)
	}
	receive(t, "the run", started)
	shift(time.Hour)
	if err := receive(t, "the cause", cause); !errors.Is(err, errLeaseLost) {
		t.Errorf("cause %v", err)
	}
	e.step(t)
	if s := statusOf(t, e.Scheduler, "j"); s.Outcome != died {
		t.Errorf("%+v", s)
	}
}
