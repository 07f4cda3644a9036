package testenv_test

import (
	"testing"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/commitbox/commitbox/internal/devserver"
	"github.com/commitbox/commitbox/internal/testenv"
)

func TestBouncerLeadsToTheDatabase(t *testing.T) {
	t.Parallel()
	db := testenv.Database(t)
	config, err := pgx.ParseConfig(db.Bouncer(t))
	if err != nil {
		t.Fatal(err)
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec
	conn, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	var name string
	if err := conn.QueryRow(t.Context(), `SELECT current_database()`).Scan(&name); err != nil {
		t.Fatal(err)
	}
	if name != db.Name {
		t.Errorf("the bouncer leads to %s, want %s", name, db.Name)
	}
}

func TestRabbitMQAnswers(t *testing.T) {
	t.Parallel()
	conn, err := amqp.Dial(testenv.RabbitMQ(t))
	if err != nil {
		t.Fatal(err)
	}
	if err := conn.Close(); err != nil {
		t.Error(err)
	}
}

func TestSharedServersAreShared(t *testing.T) {
	t.Parallel()
	if a, b := testenv.Redis(t), testenv.Redis(t); a != b {
		t.Errorf("two addresses: %s and %s", a, b)
	}
}

func TestPrivateServersAreNot(t *testing.T) {
	t.Parallel()
	a := testenv.PrivateRedis(t, devserver.RedisOptions{})
	b := testenv.PrivateRedis(t, devserver.RedisOptions{})
	if a.URL() == b.URL() || a.URL() == testenv.Redis(t) {
		t.Errorf("a private server is shared: %s, %s", a.URL(), b.URL())
	}
}
