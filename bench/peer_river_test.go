package bench

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
)

// job is the message that the others carry too.
type job struct {
	Topic       string            `json:"topic"`
	Key         string            `json:"key"`
	ContentType string            `json:"content_type"`
	Headers     map[string]string `json:"headers"`
	Payload     string            `json:"payload"`
}

func newJob() job {
	m := newMessage()
	return job{m.Topic, m.Key, m.ContentType, m.Headers, string(m.Payload)}
}

func (job) Kind() string { return "bench" }

// jobs is River, as a queue of messages.
type jobs struct {
	pool     *pgxpool.Pool
	inserter *river.Client[pgx.Tx]
}

func newJobs(b *testing.B, db *database) *jobs {
	b.Helper()
	j := &jobs{pool: db.pool(b, 16)}
	migrator, err := rivermigrate.New(riverpgxv5.New(j.pool), &rivermigrate.Config{Logger: silent})
	if err != nil {
		b.Fatal(err)
	}
	if _, err := migrator.Migrate(b.Context(), rivermigrate.DirectionUp, nil); err != nil {
		b.Fatal(err)
	}
	if j.inserter, err = river.NewClient(riverpgxv5.New(j.pool), &river.Config{Logger: silent}); err != nil {
		b.Fatal(err)
	}
	return j
}

var silent = slog.New(slog.DiscardHandler)

// worker counts the jobs that it gets.
type worker struct {
	river.WorkerDefaults[job]
	sink *sink
}

func (w *worker) Work(context.Context, *river.Job[job]) error {
	w.sink.add(1)
	return nil
}

func (j *jobs) drain(b *testing.B, n int) float64 {
	j.empty(b)
	j.fill(b, n)
	s := newSink(n)
	all := river.NewWorkers()
	river.AddWorker(all, &worker{sink: s})
	client, err := river.NewClient(riverpgxv5.New(j.pool), &river.Config{
		Queues:        map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 2000}},
		FetchCooldown: 2 * time.Millisecond, FetchPollInterval: 20 * time.Millisecond, Workers: all, Logger: silent,
	})
	if err != nil {
		b.Fatal(err)
	}
	start := time.Now()
	if err := client.Start(b.Context()); err != nil {
		b.Fatal(err)
	}
	s.wait(b)
	if err := client.Stop(b.Context()); err != nil {
		b.Fatal(err)
	}
	took := time.Since(start)
	if left := count(b, j.pool, "select count(*) from river_job where state <> 'completed'"); left != 0 {
		b.Fatalf("River left %d of %d jobs", left, n)
	}
	return float64(n) / took.Seconds()
}

func (j *jobs) empty(b *testing.B) { run(b, j.pool, "truncate river_job") }

func (j *jobs) fill(b *testing.B, n int) {
	b.Helper()
	const chunk = 10_000
	params := make([]river.InsertManyParams, min(n, chunk))
	for i := range params {
		params[i].Args = newJob()
	}
	for done := 0; done < n; done += len(params) {
		params = params[:min(len(params), n-done)]
		if _, err := j.inserter.InsertManyFast(b.Context(), params); err != nil {
			b.Fatal(err)
		}
	}
	settle(b, j.pool, "river_job")
}

// insert stores a job in a business transaction.
func (j *jobs) insert(ctx context.Context, tx pgx.Tx) error {
	_, err := j.inserter.InsertTx(ctx, tx, newJob(), nil)
	return err
}
