package saga

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/brokers/rabbitmq"
	"github.com/commitbox/commitbox/inbox"
)

// consumerName is the inbox consumer. It stays the same as long as orders are open.
const consumerName = "payments.order"

// Config says where a Worker finds things. The first four are required.
type Config struct {
	AMQPURL         string
	Queue           string // gets TopicPlaced
	DeadLetterQueue string // for messages that nobody can handle
	PaymentsURL     string
	Client          *http.Client  // for the payment service; default: a new one
	KeysFor         time.Duration // how long after the first call a key may be sent again; below what the service keeps it for. Default 23 h
	CompleteEvery   time.Duration // how often abandoned work is looked for; default 10 s
	IdleMax         time.Duration // how long a process that stands still may keep goods locked; default 10 s
	Inbox           inbox.Config  // what suits the service; how often is tried is set here, so a policy leaves max_attempts alone
}

// Worker runs the orders of one process. Any number of processes may run at once.
type Worker struct {
	pool     *pgxpool.Pool
	box      *inbox.Box
	payments payments
	cfg      Config
}

// New checks the configuration.
func New(pool *pgxpool.Pool, cfg Config) (*Worker, error) {
	if cfg.Client == nil {
		cfg.Client = &http.Client{}
	}
	if cfg.KeysFor == 0 {
		cfg.KeysFor = 23 * time.Hour
	}
	if cfg.CompleteEvery == 0 {
		cfg.CompleteEvery = 10 * time.Second
	}
	if cfg.IdleMax == 0 {
		cfg.IdleMax = 10 * time.Second
	}
	if cfg.Inbox.Logger == nil {
		cfg.Inbox.Logger = slog.Default()
	}
	// Between charge and end money is owed to somebody, so attempts go on for days before an order becomes dead and waits for
	// a person (with its payload in the inbox, and counted as dead in the metrics). No error of the database ends it early
	// either: what a bug or a missing column did goes on when it is mended. What ends it early is keyIsKnown.
	cfg.Inbox.MaxAttempts = 10_000
	cfg.Inbox.IsPermanent = func(error) bool { return false }
	box, err := inbox.New(pool, cfg.Inbox)
	if err != nil {
		return nil, err
	}
	return &Worker{pool: pool, box: box, payments: payments{cfg.PaymentsURL, cfg.Client}, cfg: cfg}, nil
}

// Run consumes placed orders and completes abandoned ones until ctx ends.
func (w *Worker) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var group sync.WaitGroup
	group.Go(func() { w.Complete(ctx) })
	err := w.Consume(ctx)
	cancel() // the one does not go on without the other
	group.Wait()
	return err
}

// Consume takes placed orders from the queue until ctx ends.
func (w *Worker) Consume(ctx context.Context) error {
	consumer, err := rabbitmq.NewLeasedConsumer(w.box, rabbitmq.ConsumerConfig{
		URL: w.cfg.AMQPURL, Queue: w.cfg.Queue, Name: consumerName, DeadLetterQueue: w.cfg.DeadLetterQueue, Logger: w.cfg.Inbox.Logger,
	}, func(ctx context.Context, lease *inbox.Lease, d rabbitmq.Delivery) error {
		return w.handle(ctx, lease, d.Payload)
	})
	if err != nil {
		return err
	}
	return consumer.Run(ctx)
}

// Complete goes on with orders that no broker will deliver again, such as one whose process died after a person had purged
// the queue, or one that was requeued by hand. It looks again and again until ctx ends.
func (w *Worker) Complete(ctx context.Context) {
	tick := time.NewTicker(w.cfg.CompleteEvery)
	defer tick.Stop()
	for {
		_, err := inbox.Resume(ctx, w.box, consumerName, func(ctx context.Context, msg inbox.Message) error {
			_, err := inbox.ProcessLeased(ctx, w.box, msg, func(ctx context.Context, lease *inbox.Lease) (inbox.Void, error) {
				return inbox.Void{}, w.handle(ctx, lease, msg.Payload)
			})
			if errors.Is(err, inbox.ErrInProgress) {
				return nil // somebody was faster
			}
			return err
		})
		if err != nil && ctx.Err() == nil {
			w.cfg.Inbox.Logger.WarnContext(ctx, "payments: some orders could not be completed yet", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
