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
// A message without an answer may have been taken; its next copy has the same id. During an alarm nothing further is
// sent on a connection that the broker has blocked. The client library gives up a connection on which a write has hung
// for some 15 seconds, so a long alarm may cost a few more copies of messages that are larger than the socket's buffers.
//
// The exchanges, queues and bindings are the application's: nothing is declared here.
//
// # Consuming
//
// A [Consumer] hands each delivery to [inbox.Process], or with [NewLeasedConsumer] to [inbox.ProcessLeased], and does at
// the broker what [inbox.Disposition] says:
//
//   - handled, now or before: acknowledged, after the commit
//   - to be tried later: moved to the retry queue with its delay, or held and requeued when due
//   - never to be handled: moved to the dead-letter queue, or rejected where the broker moves it there; a message that
//     was given up and lies in its inbox row with its payload is acknowledged
//   - without an id: to the dead letters
//
// A message is moved by publishing a copy, awaiting its confirm, and then acknowledging the original. When any of it
// fails the original stays. An acknowledgement that is lost makes the broker deliver the message again; the inbox then
// answers that it was handled, and it is acknowledged without running the handler.
//
// While the store is away, deliveries wait with their workers until it answers, so that nothing more is taken from the
// queue, and no outage uses up the deliveries of a message. One that is longer than the broker's consumer_timeout (30
// minutes) makes the broker close the channel and deliver again, which a quorum queue counts. Deliveries that found a
// message in progress or not due are not counted where the consumer counts ([HeaderDeliveries]); what is held and
// requeued on a quorum queue the broker counts.
//
// A message whose headers leave no room in a frame for those of this package loses its headers on its way to the
// dead-letter queue; id, other properties and body stay.
//
// Payload fingerprints are compared for messages that carry [HeaderOutbox], because only an outbox promises that every
// copy has the same bytes.
package rabbitmq
