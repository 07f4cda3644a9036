package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

// The test binary is its own second process: with this variable set it plays the part that the variable names.
const childEnv = "COMMITBOX_INBOX_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(childEnv) {
	case "storm":
		stormChild()
	case "hang":
		hangChild()
	case "token":
		tokenChild()
	default:
		testenv.Main(m)
	}
}

// child starts the test binary in a part, with the database's address as its argument.
func child(t *testing.T, part, url string, env ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), append(env, childEnv+"="+part, "COMMITBOX_INBOX_URL="+url)...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	return cmd
}

// childBox opens what a child works with; it ends the process on an error.
func childBox(cfg inbox.Config) *inbox.Box {
	pool, err := pgxpool.New(context.Background(), os.Getenv("COMMITBOX_INBOX_URL"))
	if err == nil {
		cfg.Logger = quiet
		var box *inbox.Box
		if box, err = inbox.New(pool, cfg); err == nil {
			return box
		}
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
	return nil
}

// hangChild claims a message, says so in the database and never ends.
func hangChild() {
	_, err := inbox.Process(context.Background(), childBox(inbox.Config{}), inbox.Message{ID: anID}, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
		if err := write(ctx, tx, anID, "hung"); err != nil {
			return inbox.Void{}, err
		}
		select {}
	})
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

func TestB39_KilledInTheHandler(t *testing.T) {
	w := newWorld(t)
	box := w.box(inbox.Config{})
	cmd := child(t, "hang", w.URL)
	deadline := time.Now().Add(patience)
	for one[int](w, `select count(*)::int from pg_locks where locktype = 'advisory' and granted and database = (select oid from pg_database where datname = current_database())`) == 0 {
		if time.Now().After(deadline) {
			t.Fatal("the child did not claim")
		}
		time.Sleep(20 * time.Millisecond)
	}
	if _, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); !errors.Is(err, inbox.ErrInProgress) {
		t.Errorf("while it runs: %v", err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	box = w.box(inbox.Config{Wait: patience}) // until the server has noticed
	if res, err := inbox.Process(t.Context(), box, inbox.Message{ID: anID}, effect(anID)); err != nil || res.Attempt != 1 {
		t.Errorf("after the kill: %+v, %v", res, err)
	}
	w.wantEffects(anID, 1)
}

// storm is what both processes of the storm do: deliver every message again and again, in an order of their own, until
// it is completed, with everything that can go wrong in a handler.
type storm struct {
	box      *inbox.Box
	messages int
	rand     *rand.Rand
	mu       sync.Mutex // guards rand
}

func (s *storm) number(n int) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rand.IntN(n)
}

func (s *storm) run(workers, copies int) error {
	var deliveries []int
	for m := range s.messages {
		for range 3 + s.number(copies) {
			deliveries = append(deliveries, m)
		}
	}
	s.rand.Shuffle(len(deliveries), func(i, j int) { deliveries[i], deliveries[j] = deliveries[j], deliveries[i] })
	queue := make(chan int, len(deliveries))
	for _, m := range deliveries {
		queue <- m
	}
	close(queue)
	var wg sync.WaitGroup
	failed := make(chan error, workers)
	for range workers {
		wg.Go(func() {
			for m := range queue {
				if err := s.deliver(m); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(failed)
	return <-failed
}

// deliver does what a broker does: it offers the message until it is acked.
func (s *storm) deliver(m int) error {
	id := inbox.ID{Consumer: "storm", Message: strconv.Itoa(m)}
	deadline := time.Now().Add(5 * time.Minute)
	for {
		action := inbox.Disposition(s.once(id))
		if action.Verdict == inbox.Ack {
			return nil
		}
		if action.Verdict == inbox.DeadLetter || time.Now().After(deadline) {
			return fmt.Errorf("message %s: verdict %s", id, action.Verdict)
		}
		time.Sleep(min(action.After, 20*time.Millisecond))
	}
}

// once delivers a message in a goroutine of its own, because a handler may end it.
func (s *storm) once(id inbox.ID) error {
	answer := make(chan error, 1)
	go func() {
		err := errors.New("the goroutine ended")
		defer func() { answer <- err }()
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		if s.number(4) == 0 {
			err = inbox.ProcessBatch(ctx, s.box, []inbox.Message{{ID: id}, {ID: inbox.ID{Consumer: "storm", Message: strconv.Itoa(s.number(s.messages))}}},
				func(ctx context.Context, tx pgx.Tx, msgs []inbox.Message) ([]inbox.Void, error) {
					_, err := writeAll(ctx, tx, msgs)
					return nil, errors.Join(err, s.trouble(ctx, tx, cancel))
				})[0].Err
			return
		}
		_, err = inbox.Process(ctx, s.box, inbox.Message{ID: id}, func(ctx context.Context, tx pgx.Tx) (int, error) {
			return 1, errors.Join(write(ctx, tx, id, ""), s.trouble(ctx, tx, cancel))
		})
	}()
	return <-answer
}

// trouble is what goes wrong in a handler, about every third time.
func (s *storm) trouble(ctx context.Context, tx pgx.Tx, cancel func()) error {
	switch s.number(30) {
	case 0:
		return errors.New("failed")
	case 1:
		panic("boom")
	case 2:
		cancel()
	case 3:
		cancel()
		return ctx.Err()
	case 4:
		_, err := tx.Exec(ctx, `select pg_terminate_backend(pg_backend_pid())`)
		return err
	case 5:
		_, _ = tx.Exec(ctx, `select 1/0`)
	case 6:
		runtime.Goexit()
	case 7, 8:
		time.Sleep(5 * time.Millisecond)
	}
	return nil
}

func stormSize() (messages, copies int) {
	if os.Getenv("COMMITBOX_SOAK") != "" {
		return 10_000, 18
	}
	return 150, 3
}

func newStorm(box *inbox.Box, seed uint64) *storm {
	messages, _ := stormSize()
	return &storm{box: box, messages: messages, rand: rand.New(rand.NewPCG(seed, 1))}
}

var stormConfig = inbox.Config{MaxAttempts: 1000, BackoffBase: time.Millisecond, BackoffMax: 10 * time.Millisecond}

func stormChild() {
	_, copies := stormSize()
	if err := newStorm(childBox(stormConfig), 2).run(8, copies); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Every message is delivered many times by 16 goroutines in two processes, whose handlers fail, panic, end their
// goroutine, cancel, leave failed statements behind and lose their connections. Every effect happens once.
func TestStorm(t *testing.T) {
	w := newWorld(t)
	cmd := child(t, "storm", w.URL)
	messages, copies := stormSize()
	if err := newStorm(w.box(stormConfig), 1).run(8, copies); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the second process: %v", err)
	}
	if n := one[int](w, `select count(*)::int from (select id from effect group by id having count(*) = 1) as e`); n != messages {
		t.Errorf("%d messages have one effect, want all %d", n, messages)
	}
	if n := one[int](w, `select count(*)::int from effect`); n != messages {
		t.Errorf("%d effects of %d messages", n, messages)
	}
	if n := one[int](w, `select count(*)::int from commitbox.inbox where status <> 'completed'`); n != 0 {
		t.Errorf("%d rows are not completed", n)
	}
}
