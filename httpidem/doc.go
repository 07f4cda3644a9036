// Package httpidem makes HTTP requests that carry an Idempotency-Key do their work once, however often a client sends them.
// It follows the IETF draft "The Idempotency-Key HTTP Header Field" (draft-ietf-httpapi-idempotency-key-header).
//
// The handler gets a transaction. Its writes, the key and the response are committed together, by package inbox, and only
// then is the response sent. A repeat gets the stored response with the header [HeaderReplayed].
//
//	request                                          answer
//	first with its key                               the handler's, after the commit
//	repeat of one that has ended                     the same status, headers of the allow-list, body; marked as replayed
//	repeat of one that runs                          409 and Retry-After
//	key used before for another method, path or body 422
//	key missing where it is required, or malformed   400
//	body over Config.BodyMax                         413
//	Config.Scope knows no caller                     403
//	the database is away, or what became of the
//	COMMIT is not known yet                          503 and Retry-After
//	that COMMIT is lost, and there was no key        500
//
// Errors of this package are problem details (RFC 9457, application/problem+json).
//
// # What is kept
//
// A response is kept, and the handler's writes are committed, if the handler returns nil and [Config.Keep] says so: by
// default for every status below 500 but 401, 403, 407, 408, 425 and 429. Any other end of the handler (such a status, an
// error, a panic, a caller who went away) rolls its writes back and leaves no trace of the key, so that a repeat runs. Such
// a response is sent as the handler wrote it. A handler that wants a 4xx answer kept without its writes uses a savepoint.
//
// Nothing is sent before the commit, so a response is collected in memory. That rules streaming out: Flush answers
// [http.ErrNotSupported], and there is neither Hijack nor a trailer. A response that the handler tried to flush, or whose
// body is over Config.StoreMax, is committed and sent without its body being kept: a repeat does not run the work again and
// gets status and headers, no body, and [HeaderBody]. A body over Config.ResponseMax is refused: the handler's Write fails,
// its writes are rolled back, and the answer is 500. Routes that stream belong outside this middleware.
//
// The middleware reads the body first: what runs before it must not.
//
// Of the headers, only those named in Config.Headers are kept. Cookies, credentials, challenges and what belongs to one
// connection cannot be named there: they would hand one session to whoever repeats a key.
//
// # What is not promised
//
//   - Effects outside the transaction. A handler may be started more than once for a key (a crash, a serialization failure);
//     what it did elsewhere, such as a charge, is not undone. Enqueue a message in its transaction instead, and do such work
//     in a consumer with a lease (see inbox.ProcessLeased).
//   - Anything after the key's row was removed by retention: the request then runs again. Publish that time to clients.
//   - That a repeat is recognised when a client writes the same request in other bytes: JSON with its fields in another
//     order, or a multipart form with a new boundary, is another payload (422).
//   - Safety of guessable keys by themselves. Keys are looked up within the caller's scope only, so Config.Scope must come
//     from what authentication has proved, never from a header that the client chooses.
//   - That a client learns of its success at the first try. It has to repeat the request, with the same key, until it gets an
//     answer that is not 409 or 503.
package httpidem
