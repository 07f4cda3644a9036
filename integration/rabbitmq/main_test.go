// Package rabbitmq_test runs the RabbitMQ publisher and consumer against a cluster of two nodes.
package rabbitmq_test

import (
	"testing"

	"github.com/commitbox/commitbox/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
