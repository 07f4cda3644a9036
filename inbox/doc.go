// Package inbox runs a message's handler with one effect, however often the message is delivered.
//
// A row per (consumer, message id) is written in the transaction of the handler's own writes, so that both commit or
// neither does. A later copy finds the row and gets the first answer; a copy that arrives while the first one runs is
// told so at once, without waiting.
//
// [Handle] works in a transaction of the caller. [Process] owns the transaction: it begins, claims, runs the handler,
// commits, runs again after a serialization failure, and records failures. [Disposition] turns the error of either into
// what a consumer does with the delivery.
//
// What is not promised: a handler may be started more than once for one message, and all but one of the runs are rolled
// back; what a run did outside its transaction (an HTTP call, a mail) is not undone. Lease mode ([ProcessLeased]) is
// for such work. A handler that sends COMMIT as text leaves the protection of this package. The promise holds while the row
// exists, which is until retention removes it.
package inbox
