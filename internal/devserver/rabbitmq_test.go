package devserver_test

import (
	"testing"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/internal/devserver"
)

func startRabbitMQ(t *testing.T, o devserver.RabbitMQOptions) *devserver.Server {
	t.Helper()
	s, err := devserver.StartRabbitMQ(t.Context(), o)
	return stopAfter(t, s, err)
}

func openChannel(t *testing.T, url string) *amqp.Channel {
	t.Helper()
	conn, err := amqp.Dial(url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() }) // an error means that the test closed or killed it
	channel, err := conn.Channel()
	if err != nil {
		t.Fatal(err)
	}
	return channel
}

// queueExists asks for a queue without making it.
func queueExists(t *testing.T, url, name string) bool {
	t.Helper()
	_, err := openChannel(t, url).QueueDeclarePassive(name, true, false, false, false, nil)
	return err == nil
}

func declare(t *testing.T, url, name string) {
	t.Helper()
	if _, err := openChannel(t, url).QueueDeclare(name, true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
}

func TestRabbitMQKeepsDataOverKillAndRestart(t *testing.T) {
	t.Parallel()
	s := startRabbitMQ(t, devserver.RabbitMQOptions{})
	declare(t, s.URL(), "kept")
	if err := s.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := s.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !queueExists(t, s.URL(), "kept") {
		t.Error("the durable queue is gone")
	}
}

func TestRabbitMQCluster(t *testing.T) {
	t.Parallel()
	first := startRabbitMQ(t, devserver.RabbitMQOptions{})
	second := startRabbitMQ(t, devserver.RabbitMQOptions{Join: first})
	declare(t, first.URL(), "seen-by-both")
	if !queueExists(t, second.URL(), "seen-by-both") {
		t.Error("the second node does not know a queue of the first")
	}
	if err := second.Kill(); err != nil {
		t.Fatal(err)
	}
	if !queueExists(t, first.URL(), "seen-by-both") {
		t.Error("the first node stopped to answer with the second")
	}
	if err := second.Restart(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !queueExists(t, second.URL(), "seen-by-both") {
		t.Error("the second node did not come back into the cluster")
	}
}
