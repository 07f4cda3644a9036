package httpidem

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/check"
)

// Handler does the work of a request, in the transaction that also keeps its response. If it returns an error, whatever it
// wrote to w is dropped, its transaction is rolled back, and the answer is 500, or 503 where PostgreSQL says that a repeat
// may succeed; the error is logged and not sent. It runs again after a serialization failure or a deadlock that it returns,
// unless the request has no key.
//
// The request's body is in memory and can be read in each run. tx must not be used after the handler has returned, and
// Commit and Rollback are not the handler's.
type Handler func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error

// Middleware runs handlers once per key. It is safe for concurrent use.
type Middleware struct {
	cfg  Config
	pool *pgxpool.Pool
	box  *inbox.Box
}

// Handle returns the http.Handler that runs h. A request's context that ends before the commit rolls h's writes back;
// COMMIT is sent even if it ends at that moment. A panic of h is rolled back and goes on to the caller.
func (m *Middleware) Handle(h Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		x := &exchange{m: m, w: w, r: r, handler: h}
		if p := x.serve(); p != nil {
			p.send(w, m.cfg.Docs)
		}
	})
}

// exchange is one request on its way.
type exchange struct {
	m       *Middleware
	w       http.ResponseWriter
	r       *http.Request
	handler Handler
	body    []byte

	// Of the last run of the handler:
	rec      *recorder
	failure  error
	panicked any
}

// serve answers the request, or says what the answer is.
func (x *exchange) serve() *problem {
	key, err := x.key()
	if err != nil {
		return problemKey(err)
	}
	scope, err := x.m.cfg.Scope(x.r)
	if key != "" && (err != nil || scope == "") {
		return &problemScope
	}
	if p := x.readBody(); p != nil {
		return p
	}
	if key == "" {
		return x.answer(inbox.Result[response]{}, x.unguarded())
	}
	return x.answer(x.once(scope, key))
}

// key returns the request's key; empty if it has and needs none.
func (x *exchange) key() (string, error) {
	values := x.r.Header.Values(headerKey)
	required := slices.Contains(x.m.cfg.Methods, x.r.Method) && !x.m.cfg.Optional
	if len(values) == 0 && !required || slices.Contains(methodsSafe, x.r.Method) {
		return "", nil
	}
	return parseKey(values, x.m.cfg.KeyMax, x.m.cfg.AllowUnquoted)
}

// readBody reads the whole body before anything is claimed, so that no transaction waits for a slow client.
func (x *exchange) readBody() *problem {
	if x.r.Body == nil {
		return nil
	}
	if x.r.ContentLength > x.m.cfg.BodyMax {
		return &problemBodySize
	}
	body, err := io.ReadAll(http.MaxBytesReader(x.w, x.r.Body, x.m.cfg.BodyMax))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return &problemBodySize
	case err != nil:
		return &problemBodyRead
	case len(body) == 0 && x.r.ContentLength > 0: // requests would look alike that are not
		x.log(errBodyGone)
		return &problemFailed
	}
	x.body = body
	return nil
}

var errBodyGone = errors.New("the body was read before this middleware, which tells requests apart by it")

// once runs the handler under the key.
func (x *exchange) once(scope, key string) (inbox.Result[response], error) {
	id, err := newID(x.m.cfg.Name, scope, key)
	if err != nil {
		return inbox.Result[response]{}, err
	}
	ctx, cancel := context.WithCancel(x.r.Context())
	defer cancel()
	msg := inbox.Message{ID: id, Fingerprint: fingerprint(x.r, x.body)}
	return inbox.Process(ctx, x.m.box, msg, func(ctx context.Context, tx pgx.Tx) (response, error) {
		kept, err := x.run(ctx, tx)
		if errors.Is(err, errRolledBack) {
			cancel() // who goes away is neither counted nor recorded, and leaves no row behind
		}
		return kept, err
	})
}

// unguarded runs the handler of a request without a key, for which nobody can find out what became of a lost COMMIT.
func (x *exchange) unguarded() error {
	ran := false
	err := pgx.BeginTxFunc(x.r.Context(), x.m.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		_, err := x.run(x.r.Context(), ownedTx{tx})
		ran = err == nil
		return err
	})
	if ran && check.CommitLost(err) {
		return errors.Join(errUnguardedUnknown, err)
	}
	return err
}

// ownedTx is a transaction that the handler cannot end.
type ownedTx struct{ pgx.Tx }

func (ownedTx) Commit(context.Context) error   { return inbox.ErrTxOwned }
func (ownedTx) Rollback(context.Context) error { return inbox.ErrTxOwned }

var errUnguardedUnknown = errors.New("httpidem: the answer to the COMMIT of a request without a key was lost")

// fingerprint tells two requests apart.
func fingerprint(r *http.Request, body []byte) []byte {
	sum := sha256.New()
	writeParts(sum, r.Method, r.URL.EscapedPath(), r.URL.RawQuery, string(body))
	return inbox.FingerprintOf(sum.Sum(nil))
}

// errRolledBack says that the handler's writes are not to be kept.
var errRolledBack = errors.New("httpidem: the handler's writes are rolled back")

// run calls the handler and returns what is kept of its response. Its error rolls back.
func (x *exchange) run(ctx context.Context, tx pgx.Tx) (response, error) {
	x.rec, x.failure, x.panicked = newRecorder(x.w.Header(), x.m.cfg.ResponseMax), nil, nil
	err := x.call(ctx, tx)
	if err == nil && x.rec.tooLarge {
		err = ErrResponseTooLarge
	}
	x.failure = err
	switch {
	case isConflict(err):
		return response{}, err // the inbox runs it again
	case err != nil:
		return response{}, errors.Join(errRolledBack, err)
	case !x.keeps(x.rec.status):
		return response{}, errRolledBack
	}
	return x.rec.stored(x.m.cfg.Headers, x.m.cfg.StoreMax), nil
}

func (x *exchange) keeps(status int) bool {
	return status < 500 && status != http.StatusTooManyRequests && x.m.cfg.Keep(status)
}

// call runs the handler. Its panic is kept, so that it can go on when the transaction has ended.
func (x *exchange) call(ctx context.Context, tx pgx.Tx) (err error) {
	defer func() {
		if x.panicked = recover(); x.panicked != nil {
			err = &inbox.PanicError{Value: x.panicked, Stack: debug.Stack()}
		}
	}()
	r := x.r.WithContext(ctx)
	r.Body = io.NopCloser(bytes.NewReader(x.body))
	err = x.handler(x.rec, r, tx)
	x.rec.end()
	return err
}

func isConflict(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && (pg.Code == "40001" || pg.Code == "40P01")
}

// answer sends what became of the request, or returns the problem to send.
func (x *exchange) answer(kept inbox.Result[response], err error) *problem {
	switch {
	case err == nil && kept.Replayed:
		kept.Value.replay(x.w)
	case err == nil, errors.Is(err, errRolledBack) && x.failure == nil:
		x.rec.send(x.w)
	case x.panicked != nil:
		panic(x.panicked)
	case errors.Is(err, errRolledBack):
		x.log(x.failure)
		return problemRolledBack(x.failure, x.m.cfg.RetryAfter)
	default:
		p := problemOf(err, x.m.cfg.RetryAfter)
		if p.status >= http.StatusInternalServerError {
			x.log(err)
		}
		return p
	}
	return nil
}

// log tells of a request that was answered with 5xx by this package.
func (x *exchange) log(err error) {
	x.logger().ErrorContext(x.r.Context(), "httpidem: a request failed", "name", x.m.cfg.Name, "method", x.r.Method, "error", err)
}

func (x *exchange) logger() *slog.Logger {
	if x.m.cfg.Inbox.Logger != nil {
		return x.m.cfg.Inbox.Logger
	}
	return slog.Default()
}
