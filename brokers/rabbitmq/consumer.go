package rabbitmq

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/check"
)

// ConsumerConfig says what a consumer takes from where, and what it does with messages that fail. URL, Queue, and one
// of DeadLetterQueue and DeadLetterByBroker are required. The queues must exist; nothing is declared here.
type ConsumerConfig struct {
	// URL, Alternates, TLS and Dial are as in [PublisherConfig].
	URL        string
	Alternates []string
	TLS        *tls.Config
	Dial       func(ctx context.Context, network, address string) (net.Conn, error)

	// Queue is the queue to consume.
	Queue string

	// Name is the consumer's name in the inbox: the service and the handler. It must stay the same as long as the
	// history counts. 1 to 200 bytes, valid UTF-8 without NUL. Default: Queue, which may be too long for it.
	Name string

	// Workers is the number of handlers that run at the same time. Default 8.
	Workers int

	// Prefetch is how many deliveries wait in this process, beside the running and the held ones. While fewer than
	// HeldMax are held, others wait in their stead. Default: Workers.
	Prefetch int

	// MessageID returns the id of a message that has none in the message_id property; empty, or a panic: it has none.
	// Default: such a message goes to the dead letters. The id must be the same on every copy and different on every other message.
	MessageID func(d Delivery) string

	// RetryQueue is a queue where a message waits until it is due: declared by the application without consumers, with
	// x-dead-letter-exchange "" and x-dead-letter-routing-key Queue. RabbitMQ looks at the head of a queue only, so a
	// short wait behind a long one takes as long as the long one.
	//
	// Without it a message that has to wait is held unacknowledged in this process and then requeued. On a quorum queue
	// every requeue counts against its delivery limit.
	RetryQueue string

	// HeldMax is the number of messages that are held at the same time; when it is reached, workers wait. Default 64.
	HeldMax int

	// HoldMax is the longest time that a message is held; after that it is requeued and asked for again. It must be well
	// below the broker's consumer_timeout, which is 30 minutes. Default 1 minute.
	HoldMax time.Duration

	// DeadLetterQueue is the queue for messages that cannot be handled. They are published to it, with the header
	// [HeaderReason], and acknowledged when that is confirmed.
	DeadLetterQueue string

	// DeadLetterByBroker says that Queue has a dead-letter exchange with a queue behind it. Messages that cannot be
	// handled are rejected, and the broker moves them. A queue without dead-letter exchange would drop them, which
	// cannot be seen from here.
	DeadLetterByBroker bool

	// DrainTimeout is how long running handlers may go on when Run is told to stop. Default 20 s.
	DrainTimeout time.Duration

	// OnError hears of every delivery that was not handled, after it was settled. It must not block for long. ctx is
	// the handler's.
	OnError func(ctx context.Context, d Delivery, err error)

	Observer commitbox.Observer // hears commitbox.ConsumerMessages. Default: commitbox.Discard
	Logger   *slog.Logger       // default: slog.Default()
}

// ErrMissingID is what OnError gets for a message without an id.
var ErrMissingID = errors.New("rabbitmq: the message has no id, so copies of it cannot be told apart")

// errExited stands for a handler that ended its goroutine.
var errExited = errors.New("rabbitmq: the handler called runtime.Goexit")

// Consumer takes messages from a queue and handles each one through the inbox: the handler's writes in the
// transaction it is given commit once per message id, however often the broker delivers it.
type Consumer struct {
	box      *inbox.Box
	cfg      ConsumerConfig
	endpoint endpoint
	handle   func(ctx context.Context, d Delivery) error // through the inbox

	running atomic.Bool
	slots   chan struct{} // one entry per running handler
	holds   chan struct{} // one entry per held delivery
}

// NewConsumer checks the configuration; Run connects.
//
// The handler runs in the transaction that its effect belongs to. It is called by several goroutines at once, with a
// context that ends when the time for draining is over, not when Run is told to stop.
func NewConsumer(box *inbox.Box, cfg ConsumerConfig, handler func(ctx context.Context, tx pgx.Tx, d Delivery) error) (*Consumer, error) {
	if handler == nil {
		return newConsumer(box, cfg, nil)
	}
	return newConsumer(box, cfg, func(ctx context.Context, d Delivery) error {
		_, err := inbox.Process(ctx, box, d.Message, func(ctx context.Context, tx pgx.Tx) (inbox.Void, error) {
			return inbox.Void{}, handler(ctx, tx, d)
		})
		return err
	})
}

// NewLeasedConsumer is NewConsumer for work that leaves the database: the handler runs under a lease and not in a
// transaction, as in [inbox.ProcessLeased], and the row keeps the message's payload, so that [inbox.Resume] can go on with
// it as well. A copy that comes while the lease lasts waits for its end.
func NewLeasedConsumer(box *inbox.Box, cfg ConsumerConfig, handler func(ctx context.Context, lease *inbox.Lease, d Delivery) error) (*Consumer, error) {
	if handler == nil {
		return newConsumer(box, cfg, nil)
	}
	return newConsumer(box, cfg, func(ctx context.Context, d Delivery) error {
		_, err := inbox.ProcessLeased(ctx, box, d.Message, func(ctx context.Context, lease *inbox.Lease) (inbox.Void, error) {
			return inbox.Void{}, handler(ctx, lease, d)
		})
		return err
	})
}

func newConsumer(box *inbox.Box, cfg ConsumerConfig, handle func(ctx context.Context, d Delivery) error) (*Consumer, error) {
	cfg.fill()
	e, err := newEndpoint(cfg.URL, cfg.Alternates, cfg.TLS, cfg.Dial, "commitbox consumer "+cfg.Name)
	errs := []error{err, cfg.check()}
	if box == nil {
		errs = append(errs, errors.New("rabbitmq: box is nil"))
	}
	if handle == nil {
		errs = append(errs, errors.New("rabbitmq: handler is nil"))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	return &Consumer{
		box: box, cfg: cfg, endpoint: e, handle: handle,
		slots: make(chan struct{}, cfg.Workers),
		holds: make(chan struct{}, cfg.HeldMax),
	}, nil
}

func (c *ConsumerConfig) fill() {
	setDefault(&c.Name, c.Queue)
	setDefault(&c.Workers, 8)
	setDefault(&c.Prefetch, c.Workers)
	setDefault(&c.HeldMax, 64)
	setDefault(&c.HoldMax, time.Minute)
	setDefault(&c.DrainTimeout, 20*time.Second)
	if c.Observer == nil {
		c.Observer = commitbox.Discard
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

func setDefault[T comparable](field *T, value T) {
	if *field == *new(T) {
		*field = value
	}
}

func (c *ConsumerConfig) check() error {
	var errs []error
	refuse := func(bad bool, text string) {
		if bad {
			errs = append(errs, errors.New("rabbitmq: "+text))
		}
	}
	refuse(c.Queue == "", "Queue is empty")
	if c.Queue != "" {
		errs = append(errs, check.Text("ConsumerConfig.Name", c.Name, nameMax))
	}
	refuse(c.Workers < 0 || c.Prefetch < 0 || c.HeldMax < 0, "Workers, Prefetch and HeldMax must not be negative")
	refuse(c.Workers+c.Prefetch+c.HeldMax > prefetchMax, fmt.Sprintf("Workers, Prefetch and HeldMax are together over %d", prefetchMax))
	refuse(c.HoldMax < 0, "HoldMax is negative")
	refuse(c.DrainTimeout < 0, "DrainTimeout is negative")
	refuse((c.DeadLetterQueue == "") == !c.DeadLetterByBroker, "set either DeadLetterQueue or DeadLetterByBroker: a message that cannot be handled must go somewhere")
	refuse(c.RetryQueue != "" && c.RetryQueue == c.Queue, "RetryQueue is Queue itself")
	refuse(c.DeadLetterQueue != "" && c.DeadLetterQueue == c.Queue, "DeadLetterQueue is Queue itself")
	return errors.Join(errs...)
}

const (
	prefetchMax = 65535 // what the protocol can say
	nameMax     = 200   // what the inbox takes as ID.Consumer
)

// Run consumes until ctx ends, and connects again with a growing delay whenever the connection breaks or the queue is
// missing. Then it takes no more deliveries, lets running handlers finish within DrainTimeout, settles what they have
// finished, returns everything else to the queue and comes back with nil. Handlers that are still running after that
// have their context cancelled; the error says how many did not come back, and their messages are back in the queue.
//
// A Consumer runs once at a time.
func (c *Consumer) Run(ctx context.Context) error {
	if !c.running.CompareAndSwap(false, true) {
		return errors.New("rabbitmq: the consumer is running already")
	}
	defer c.running.Store(false)
	r := c.newRun(ctx)
	defer r.end()
	var pause backoff
	for ctx.Err() == nil {
		began := time.Now()
		err := r.session(ctx)
		if ctx.Err() != nil {
			break
		}
		if time.Since(began) > backoffMax {
			pause.succeeded()
		}
		pause.failed(err)
		c.cfg.Logger.Warn("rabbitmq: consumer lost its queue", "consumer", c.cfg.Name, "queue", c.cfg.Queue, "retry_in", pause.delay, "error", err)
		sleep(ctx, pause.delay)
	}
	return r.drain()
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}
