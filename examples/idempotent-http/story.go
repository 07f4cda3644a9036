package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/httpidem"
)

// story is a client and what it expects.
type story struct {
	url    string
	client *http.Client
	pool   *pgxpool.Pool
	out    io.Writer
}

func newStory(url string, pool *pgxpool.Pool, out io.Writer) *story {
	return &story{url: url, client: &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{}}, pool: pool, out: out}
}

const (
	apples = `{"sku":"apples","quantity":2}`
	pears  = `{"sku":"pears","quantity":1}`
)

// scenes are sent one after the other.
var scenes = []struct {
	what, who, key, body string
	status               int
	replayed             bool
}{
	{"Alice orders two apples", "alice", `"a-1"`, apples, 201, false},
	{"the answer was lost, she asks again", "alice", `"a-1"`, apples, 201, true},
	{"and again, with the key unquoted", "alice", `a-1`, apples, 201, true},
	{"another order under the same key", "alice", `"a-1"`, pears, 422, false},
	{"the other order under a new key", "alice", `"a-2"`, pears, 201, false},
	{"Bob happens to use Alice's key", "bob", `"a-1"`, apples, 201, false},
	{"a stranger tries Alice's key", "mallory", `"a-1"`, apples, 403, false},
	{"a client without a key", "carol", "", apples, 400, false},
	{"a key with a quote in the wrong place", "carol", `"c"1"`, apples, 400, false},
	{"an order that makes no sense", "carol", `"c-1"`, `{"sku":"apples"}`, 400, false},
	{"the same again: its answer is kept", "carol", `"c-1"`, `{"sku":"apples"}`, 400, true},
	{"an item that is sold too fast", "carol", `"c-2"`, `{"sku":"flood","quantity":1}`, 429, false},
	{"later: nothing was kept, so it runs", "carol", `"c-2"`, `{"sku":"flood","quantity":1}`, 429, false},
}

// orders is how many orders the scenes and the crowd are to leave behind: a-1, a-2, Bob's and the crowd's.
const orders = 4

func (s *story) tell(ctx context.Context) error {
	defer s.client.CloseIdleConnections()
	var errs []error
	for _, scene := range scenes {
		status, replayed, text, err := s.post(ctx, scene.who, scene.key, scene.body)
		if err != nil {
			return err
		}
		mark := ""
		if replayed {
			mark = "replayed"
		}
		fmt.Fprintf(s.out, "  %-38s %-6s  %d %-8s  %s\n", scene.what, scene.key, status, mark, text)
		if status != scene.status || replayed != scene.replayed {
			errs = append(errs, fmt.Errorf("%s: want %d, replayed %v", scene.what, scene.status, scene.replayed))
		}
	}
	errs = append(errs, s.crowd(ctx), s.count(ctx))
	return errors.Join(errs...)
}

// crowd sends one request twenty times at once.
func (s *story) crowd(ctx context.Context) error {
	type answer struct {
		status   int
		replayed bool
		err      error
	}
	const copies = 20
	answers := make(chan answer, copies)
	for range copies {
		go func() {
			status, replayed, _, err := s.post(ctx, "carol", `"c-3"`, apples)
			answers <- answer{status, replayed, err}
		}()
	}
	var first, again, told int
	for range copies {
		a := <-answers
		switch {
		case a.err != nil:
			return a.err
		case a.status == http.StatusConflict:
			told++
		case a.status == http.StatusCreated && a.replayed:
			again++
		case a.status == http.StatusCreated:
			first++
		default:
			return fmt.Errorf("a copy was answered with %d", a.status)
		}
	}
	fmt.Fprintf(s.out, "  %-38s %-6s  %d ran, %d got its answer, %d were told to wait (409)\n", "Carol's client sends 20 copies at once", `"c-3"`, first, again, told)
	if first != 1 {
		return fmt.Errorf("%d copies ran", first)
	}
	return nil
}

// count compares with what stands in the tables.
func (s *story) count(ctx context.Context) error {
	var placed, messages int
	err := s.pool.QueryRow(ctx, `select (select count(*) from orders), (select count(*) from commitbox.outbox_message)`).Scan(&placed, &messages)
	if err != nil {
		return err
	}
	fmt.Fprintf(s.out, "\n  %d orders and %d messages, want %d of each\n", placed, messages, orders)
	if placed != orders || messages != orders {
		return errors.New("an order is missing or was placed twice")
	}
	return nil
}

func (s *story) post(ctx context.Context, who, key, body string) (status int, replayed bool, text string, err error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.url+"/orders", strings.NewReader(body))
	if err != nil {
		return 0, false, "", err
	}
	r.Header.Set("Authorization", "Bearer "+who)
	if key != "" {
		r.Header.Set("Idempotency-Key", key)
	}
	resp, err := s.client.Do(r)
	if err != nil {
		return 0, false, "", err
	}
	defer resp.Body.Close()
	content, err := io.ReadAll(resp.Body)
	text = strings.TrimSpace(string(content))
	var problem struct{ Title string }
	if json.Unmarshal(content, &problem) == nil && problem.Title != "" {
		text = problem.Title
	}
	return resp.StatusCode, resp.Header.Get(httpidem.HeaderReplayed) == "true", text, err
}
