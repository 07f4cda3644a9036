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
//
// # Modes
//
// A [Policy] says per consumer what guards its messages, and [Policies] follow it at run time. Without Policies, and for
// consumers without a policy, the mode is postgres. [Result].DecidedBy says who gave an answer, and so does a label of the
// metric commitbox_inbox_handled.
//
// A change of the mode passes through stages, because replicas follow it one by one and each mode knows only what it has
// written itself. For 30 seconds and a lease, and for as long as some replica has not said that it follows, messages are
// guarded by both stores ([StageBoth]); then what the former store knows is still read until the retry horizon has passed
// ([StageHistory]). [Policies.Forget] ends that at once. A program without Policies takes no part in it.
//
// # Mode postgres: exactly-once effect
//
// The row is the guard. What the handler writes in the transaction is committed once per message while the row exists.
// Not promised: what a handler does outside its transaction; anything after retention, whose row is gone; anything about
// an asynchronous failover that lost commits, where the effect is lost with its row and runs again.
//
// # Mode double: strong
//
// A cache ([Config].Cache, such as package cache) is asked first, and the row is always written. The cache holds copies of
// committed rows, written after the commit while the caller goes on, until the row's retention ends. If it is away, slow, empty
// or wrong about what it holds, the table decides. Where a thousand look-ups of a consumer in a row have found nothing, only
// every eighth of its messages is looked up until one is found, and what the broker delivers again (Message.Delivery above 1);
// the table answers the others. Not promised, beside what mode postgres does not: an effect for each message that a restored
// database has lost. Copies are bound to the database's identity, which a replica learns about once a second. After a
// failover that lost commits, or a recovery to an earlier time, a copy of a lost row may be an answer for up to two seconds,
// or for 15 seconds on a replica that cannot reach the database; then every copy is a miss. A database that is started from
// a copy of its files or disks has the same identity: call [Policies.RotateCache], or cache_rotate in SQL, before consumers
// go on. That the log is behind what this process has seen is noticed and then nothing cached is used, but a process that
// was started after the restore cannot see it. A crash of the server under synchronous_commit = off is such a restore.
// Without Config.Cache this is mode postgres.
//
// # Mode cache: weak
//
// A token in Redis ([Config].Guard) is the guard, and its finished message the history. There is no row, so failures are not
// recorded, attempts are not counted (Message.Delivery is the only limit, see Config.MaxDeliveries), nothing can be listed
// or requeued, and a lost COMMIT cannot be found out. Not promised: one effect. A handler may run again, and its effects be
// there twice, when its process dies between its commit and Redis hearing of it, when Redis forgets (a failover, an
// eviction, a flush, a restart), and when its process stands still for longer than the lease. While Redis does not answer,
// the policy decides: closed refuses, open runs without a guard and counts it. An error of Redis after the handler has
// succeeded is none of the handler. When the database is put back to an earlier time, Redis still says that the messages are
// done whose effects it lost: remove the keys of the guard (PREFIX:guard:*) before consumers go on. [Handle] and leases
// write their row in this mode too, because the commit is the caller's and because steps and fencing live in the row; they
// read what Process has finished in Redis, but Process does not read their rows: use one of them for a consumer.
//
// # Mode off: none
//
// Nothing guards and nothing is promised: every delivery runs, is counted (commitbox_inbox_unguarded) and is said to be
// decided by nobody. A failure is rolled back, by Handle to its savepoint, and not recorded. Leases keep their row. Nothing
// is remembered of what ran in this mode, so copies of it run again after it is left.
package inbox
