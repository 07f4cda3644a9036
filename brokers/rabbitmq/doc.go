// Package rabbitmq publishes outbox messages to RabbitMQ and consumes them into an inbox.
//
// # Publishing
//
// A message is delivered when the broker has confirmed it and at least one queue took it. The message id, content type
// and headers travel in the AMQP fields of the same meaning; header names that begin with "commitbox-" are reserved.
// [Publisher.Publish] tells failures apart like this:
//
//   - returned by the broker, a nack, a missing exchange, no answer in time: tried again, counted
//   - no connection, connection lost, publishes blocked by a memory or disk alarm: unavailable, nothing is counted
//   - names or headers that the protocol cannot carry, a message over the broker's size limit: permanent
//
// A message without an answer may have been taken; its next copy has the same id. The exchange, queues and bindings
// are the application's: nothing is declared here.
package rabbitmq
