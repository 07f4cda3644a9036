package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/jackc/pgx/v5"
)

// crasher sees every statement and every call of a worker, before and after it, and kills the process at one of these points,
// with SIGKILL: nothing is flushed, closed or given back. Or it stops it with SIGSTOP, until somebody wakes it up.
type crasher struct {
	at  string    // the point to die at, or to stop at, behind stopAt; listPoints: none, but tell of each
	out io.Writer // the parent

	mu   sync.Mutex
	told map[string]bool
}

const (
	listPoints = "list"
	stopAt     = "stop "
)

// The lines that a child writes.
const (
	lineListening = "listening "
	linePoint     = "point "
	lineKilled    = "killed "
)

func (c *crasher) point(label string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case label == c.at:
		fmt.Fprintln(c.out, lineKilled+label)
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGKILL)
		select {} // nobody comes back from it
	case stopAt+label == c.at:
		c.at = ""
		fmt.Fprintln(c.out, lineKilled+label)
		_ = syscall.Kill(syscall.Getpid(), syscall.SIGSTOP)
	case c.at == listPoints && !c.told[label]:
		if c.told == nil {
			c.told = map[string]bool{}
		}
		c.told[label] = true
		fmt.Fprintln(c.out, linePoint+label)
	}
}

var (
	queryName = regexp.MustCompile(`^-- name: (\w+)`)
	stepNames = []string{"reserve", "charge", "charge since", "deduct", "refund", "refund since"}
)

// wordsMax is enough to tell the statements of the saga apart.
const wordsMax = 9

// nameOf tells a statement in a few words; empty: it is of no interest.
func nameOf(sql string, args []any) string {
	words := strings.Fields(sql)
	if m := queryName.FindStringSubmatch(sql); m != nil {
		words = []string{m[1]}
		for _, arg := range args {
			if step, ok := arg.(string); ok && slices.Contains(stepNames, step) {
				words = append(words, step)
			}
		}
	}
	name := strings.Join(words[:min(len(words), wordsMax)], " ")
	if name == ";" || name == "-- ping" || strings.HasPrefix(name, "InboxRenew") || strings.HasPrefix(name, "InboxRunnable") {
		return ""
	}
	return name
}

type nameKey struct{}

// TraceQueryStart implements [pgx.QueryTracer].
func (c *crasher) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	name := nameOf(data.SQL, data.Args)
	if name != "" {
		c.point("before " + name)
	}
	return context.WithValue(ctx, nameKey{}, name)
}

// TraceQueryEnd implements [pgx.QueryTracer].
func (c *crasher) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	if name, _ := ctx.Value(nameKey{}).(string); name != "" {
		c.point("after " + name)
	}
}

// TraceBatchStart implements [pgx.BatchTracer].
func (c *crasher) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	var names []string
	for _, q := range data.Batch.QueuedQueries {
		if name := nameOf(q.SQL, q.Arguments); name != "" {
			names = append(names, name)
		}
	}
	name := strings.Join(names, " + ")
	c.point("before " + name)
	return context.WithValue(ctx, nameKey{}, name)
}

// TraceBatchQuery implements [pgx.BatchTracer].
func (*crasher) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements [pgx.BatchTracer].
func (c *crasher) TraceBatchEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchEndData) {
	name, _ := ctx.Value(nameKey{}).(string)
	c.point("after " + name)
}

// RoundTrip implements [http.RoundTripper].
func (c *crasher) RoundTrip(r *http.Request) (*http.Response, error) {
	name := r.Method + " " + r.URL.Path
	c.point("before " + name)
	resp, err := http.DefaultTransport.RoundTrip(r)
	if err == nil && resp.StatusCode == http.StatusCreated {
		c.point("after " + name)
	}
	return resp, err
}
