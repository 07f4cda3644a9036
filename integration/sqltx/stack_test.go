package sqltx_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
	"github.com/commitbox/commitbox/optimistic"
	"github.com/commitbox/commitbox/outbox"
)

type receipt struct {
	Number int
	At     time.Time
}

// messages are hard to carry: binary, empty, with headers, keys and a time.
func messages(topic string) []outbox.Message {
	return []outbox.Message{
		{ID: uuid.New(), Topic: topic, Payload: []byte{0, 1, '\\', '\'', 0xff, 0}, Headers: map[string]string{"a": `"\'{},é`, "b": ""}},
		{Topic: topic, Key: `k,{}"\`, ContentType: "application/json", Payload: []byte(`{"a": "b"}`)},
		{Topic: topic, Key: "NULL"},
		{Topic: topic, Payload: []byte(`\x00`)},
		{Topic: topic, Payload: []byte("later"), DeliverAt: time.Date(2124, 2, 29, 23, 59, 59, 123456000, time.FixedZone("", -9*3600))},
	}
}

func TestA5_EveryStackCommitsOnce(t *testing.T) {
	forEach(t, func(w *world) {
		sent := messages(w.name)
		want := receipt{7, time.Date(2024, 2, 29, 1, 2, 3, 4000, time.UTC)}
		for _, outcome := range []inbox.Outcome{inbox.Executed, inbox.Replayed} {
			s := w.begin(nil)
			got, err := inbox.Handle(w.Context(), s.view, w.id, func(ctx context.Context) (receipt, error) {
				_, err := outbox.Enqueue(ctx, s.view, sent...)
				return want, errors.Join(err, s.write(ctx))
			})
			if err != nil || got.Outcome != outcome || got.Value != want {
				w.Fatalf("%v, %v", got, err)
			}
			s.commit()
			w.want(1, "completed 1", 4)
		}
		w.wantSent(sent)
	})
}

// wantSent compares what is stored with what was sent, byte by byte.
func (w *world) wantSent(sent []outbox.Message) {
	w.Helper()
	rows, err := w.Pool.Query(w.Context(), `select coalesce(key, ''), coalesce(content_type, ''), headers, payload, null::timestamptz, message_id
			from (select * from commitbox.outbox_message order by id) m where topic = $1
		union all select coalesce(key, ''), coalesce(content_type, ''), headers, payload, due_at, message_id from commitbox.outbox_scheduled where topic = $1`, w.name)
	if err != nil {
		w.Fatal(err)
	}
	defer rows.Close()
	n := 0
	for ; rows.Next(); n++ {
		var got outbox.Message
		var due *time.Time
		if err := rows.Scan(&got.Key, &got.ContentType, &got.Headers, &got.Payload, &due, &got.ID); err != nil {
			w.Fatal(err)
		}
		want := sent[n]
		if got.Key != want.Key || got.ContentType != want.ContentType || string(got.Payload) != string(want.Payload) ||
			len(got.Headers) != len(want.Headers) || got.Headers["a"] != want.Headers["a"] || (due == nil) != want.DeliverAt.IsZero() ||
			due != nil && !due.Equal(want.DeliverAt) || n == 0 && got.ID != want.ID {
			w.Errorf("%d is %+v at %v, want %+v", n, got, due, want)
		}
	}
	if rows.Err() != nil || n != len(sent) {
		w.Errorf("%d messages, %v", n, rows.Err())
	}
}

func TestA5_EveryStackRollsBack(t *testing.T) {
	forEach(t, func(w *world) {
		s := w.begin(nil)
		_, err := inbox.Handle(w.Context(), s.view, w.id, func(ctx context.Context) (int, error) {
			_, err := outbox.Enqueue(ctx, s.view, messages(w.name)...)
			return 1, errors.Join(err, s.write(ctx))
		})
		if err != nil {
			w.Fatal(err)
		}
		if err := s.tx.Rollback(); err != nil {
			w.Fatal(err)
		}
		w.want(0, "", 0)
		if _, err := outbox.Enqueue(w.Context(), s.view, messages(w.name)...); !errors.As(err, new(*commitbox.InputError)) || !errors.Is(err, pgx.ErrTxClosed) {
			w.Errorf("after the end: %v", err)
		}
	})
}

var errMine = errors.New("mine")

// A failure goes back to Handle's savepoint and is recorded; what the caller did before stays.
func TestA5_EveryStackRecordsAFailure(t *testing.T) {
	forEach(t, func(w *world) {
		s := w.begin(nil)
		if _, err := outbox.Enqueue(w.Context(), s.view, outbox.Message{Topic: w.name}); err != nil {
			w.Fatal(err)
		}
		_, err := inbox.Handle(w.Context(), s.view, w.id, func(ctx context.Context) (int, error) {
			_, err := outbox.Enqueue(ctx, s.view, messages(w.name)...)
			return 1, errors.Join(err, s.write(ctx), errMine)
		})
		if !errors.Is(err, inbox.ErrFailed) || !errors.Is(err, errMine) {
			w.Fatal(err)
		}
		s.commit()
		w.want(0, "failed 1", 1)
	})
}

// PostgreSQL's refusal in the middle of a handler, by the stack's own means or through the view, is known for what it is.
func TestA5_EveryStackTellsPostgreSQLsErrors(t *testing.T) {
	forEach(t, func(w *world) {
		s := w.begin(nil)
		_, err := inbox.Handle(w.Context(), s.view, w.id, func(ctx context.Context) (int, error) { return 1, s.add(ctx, "bad") })
		if !errors.Is(err, inbox.ErrDead) { // a violated check is permanent
			w.Errorf("by the stack's own means: %v", err)
		}
		other := inbox.ID{Consumer: "other", Message: w.name}
		_, err = inbox.Handle(w.Context(), s.view, other, func(ctx context.Context) (int, error) {
			_, err := s.view.Exec(ctx, insert, "bad")
			return 1, err
		})
		pg := new(pgconn.PgError)
		if !errors.Is(err, inbox.ErrDead) || !errors.As(err, &pg) || pg.Code != "23514" || pg.ConstraintName != "no_bad_note" || pg.TableName != "effects" {
			w.Errorf("through the view: %v, %+v", err, pg)
		}
		s.commit()
		w.want(0, "dead 1", 0)
		contains(w, one[string](w, `select last_error from commitbox.inbox where consumer = 'other' and message_id = $1`, w.name), "constraint no_bad_note")
	})
}

// Data that PostgreSQL quotes in an error does not get into the row.
func TestA5_EveryStackKeepsDataOutOfTheRow(t *testing.T) {
	forEach(t, func(w *world) {
		s := w.begin(nil)
		_, err := inbox.Handle(w.Context(), s.view, w.id, func(ctx context.Context) (int, error) {
			rows, err := s.tx.QueryContext(ctx, `select ('secret'||note)::int from (values ('x')) v (note)`)
			if err == nil {
				for rows.Next() {
				}
				err = errors.Join(rows.Err(), rows.Close())
			}
			return 1, err
		})
		if !errors.Is(err, inbox.ErrDead) {
			w.Fatal(err)
		}
		s.commit()
		if text := one[string](w, `select last_error from commitbox.inbox where message_id = $1`, w.name); text == "" || len(text) > 100 {
			w.Error(text)
		} else {
			contains(w, text, "22P02")
			contains(w, text, "invalid data")
		}
	})
}

// However the handler ends without success, nothing of it can be committed as done.
func TestA5_EveryStackIsUnusableAfterAnUnrecordedFailure(t *testing.T) {
	forEach(t, func(w *world) {
		for name, handler := range map[string]func(context.Context, *session) error{
			"an error":                           func(context.Context, *session) error { return errMine },
			"a panic":                            func(context.Context, *session) error { panic("mine") },
			"a swallowed error":                  func(ctx context.Context, s *session) error { _ = s.add(ctx, "bad"); return nil },
			"rows left open":                     leaveRowsOpen,
			"rows left open, with the savepoint": leaveRowsOpen,
		} {
			s := w.begin(nil)
			options := []inbox.Option{inbox.NoSavepoint()}
			if strings.HasSuffix(name, "savepoint") {
				options = nil
			}
			func() {
				defer func() { _ = recover() }()
				got, err := inbox.Handle(w.Context(), s.view, inbox.ID{Consumer: name, Message: w.name}, func(ctx context.Context) (int, error) {
					return 1, errors.Join(s.write(ctx), handler(ctx, s))
				}, options...)
				if err == nil {
					w.Errorf("%s: %v without an error", name, got)
				}
			}()
			_ = s.tx.Commit()
			w.want(0, "", 0)
		}
	})
}

func leaveRowsOpen(ctx context.Context, s *session) error {
	rows, err := s.tx.QueryContext(ctx, `select repeat('x', 1000) from generate_series(1, 10000)`)
	if err == nil {
		rows.Next()
		err = rows.Err()
		s.w.Cleanup(func() { _ = rows.Close() })
	}
	return err
}

func TestF5_AHandlerThatEndsTheTransactionIsToldInEveryStack(t *testing.T) {
	forEach(t, func(w *world) {
		for name, end := range map[string]func(*session) error{"commit": func(s *session) error { return s.tx.Commit() }, "rollback": func(s *session) error { return s.tx.Rollback() }} {
			s := w.begin(nil)
			_, err := inbox.Handle(w.Context(), s.view, inbox.ID{Consumer: name, Message: w.name}, func(context.Context) (int, error) { return 1, end(s) })
			if !errors.Is(err, inbox.ErrTxEnded) {
				w.Errorf("%s: %v", name, err)
			}
		}
	})
}

// COMMIT sent as text cannot be seen through database/sql. It is noticed when the savepoint is missed; without one and
// without a result it is not, and what comes after is committed by itself.
func TestF5_ACommitAsTextIsNotSeenThroughDatabaseSQL(t *testing.T) {
	forEach(t, func(w *world) {
		handler := func(s *session) func(context.Context) (inbox.Void, error) {
			return func(ctx context.Context) (inbox.Void, error) {
				_, err := s.tx.ExecContext(ctx, `commit`)
				return inbox.Void{}, errors.Join(err, s.write(ctx))
			}
		}
		s := w.begin(nil)
		_, err := inbox.Handle(w.Context(), s.view, w.id, handler(s))
		if pg := new(pgconn.PgError); !errors.Is(err, inbox.ErrFailed) || !errors.As(err, &pg) || pg.Code != "25P01" {
			w.Errorf("with the savepoint: %v", err)
		}
		_ = s.tx.Rollback()
		s = w.begin(nil)
		if _, err := inbox.Handle(w.Context(), s.view, inbox.ID{Consumer: "unseen", Message: w.name}, handler(s), inbox.NoSavepoint()); err != nil {
			w.Errorf("without the savepoint: %v", err)
		}
		_ = s.tx.Rollback()
		if got := one[int](w, `select count(*) from effects where note = $1`, w.name); got != 2 {
			w.Errorf("%d effects are committed, want 2", got)
		}
	})
}

// A context that ends rolls a transaction back that was begun with it, and what became of the handler with it: that is not
// the handler's doing, and the message is delivered again.
func TestA5_AnEndedContextEndsTheTransactionBegunWithIt(t *testing.T) {
	forEach(t, func(w *world) {
		for cancelled, want := range map[bool]error{true: inbox.ErrUnavailable, false: inbox.ErrFailed} {
			for _, returned := range []error{nil, errMine} {
				// Its own, because PostgreSQL may drop the lock later than database/sql says that the transaction has ended.
				id := inbox.ID{Consumer: fmt.Sprint(cancelled, returned), Message: w.name}
				ctx, cancel := context.WithCancel(w.Context())
				if !cancelled {
					ctx, cancel = context.WithTimeout(w.Context(), 300*time.Millisecond)
				}
				s := w.beginIn(ctx, nil)
				_, err := inbox.Handle(ctx, s.view, id, func(ctx context.Context) (int, error) {
					if err := s.write(ctx); err != nil {
						return 0, err
					}
					if cancelled {
						cancel()
					}
					for !errors.Is(s.view.SendBatch(ctx, new(pgx.Batch)).Close(), pgx.ErrTxClosed) {
						time.Sleep(time.Millisecond) // database/sql rolls back by itself
					}
					return 1, returned
				})
				cancel()
				if !errors.Is(err, want) || inbox.Disposition(err).Verdict != inbox.Retry {
					w.Errorf("want %v: %v", want, err)
				}
				w.want(0, "", 0)
			}
		}
	})
}

// One that was begun with a context of its own keeps the record of the failure.
func TestA5_ATransactionOutlivesTheHandlersContext(t *testing.T) {
	forEach(t, func(w *world) {
		ctx, cancel := context.WithCancel(w.Context())
		s := w.beginIn(context.WithoutCancel(ctx), nil)
		_, err := inbox.Handle(ctx, s.view, w.id, func(ctx context.Context) (int, error) {
			err := s.write(ctx)
			cancel()
			return 1, errors.Join(err, ctx.Err())
		})
		if !errors.Is(err, inbox.ErrFailed) || !errors.Is(err, context.Canceled) {
			w.Error(err)
		}
		s.commit()
		w.want(0, "failed 1", 0)
	})
}

// A connection that is lost while the handler runs is nobody's failure, whether PostgreSQL says so or the network, and
// whether the handler returns the first error or one behind it.
func TestF17_EveryStackTellsALostConnection(t *testing.T) {
	forEach(t, func(w *world) {
		proxy := testenv.NewProxy(w.T, w.URL)
		w.open = w.connect(w.T, proxy.URL(w.T, w.URL))
		for name, lose := range map[string]func(pid int){
			"terminated": func(pid int) { one[bool](w, `select pg_terminate_backend($1, 5000)`, pid) },
			"cut":        func(int) { proxy.Cut() },
		} {
			for _, behind := range []int{0, 1} {
				s := w.begin(nil)
				_, err := inbox.Handle(w.Context(), s.view, inbox.ID{Consumer: fmt.Sprint(name, behind), Message: w.name}, func(ctx context.Context) (int, error) {
					var pid int
					if err := s.view.QueryRow(ctx, `select pg_backend_pid()`).Scan(&pid); err != nil {
						return 0, err
					}
					lose(pid)
					for range behind {
						_ = s.write(ctx)
					}
					return 1, s.write(ctx)
				})
				if !errors.Is(err, inbox.ErrUnavailable) {
					w.Errorf("%s, error %d: %v", name, behind, err)
				}
				_ = s.tx.Commit()
				w.want(0, "", 0)
			}
		}
	})
}

func TestF16_EveryStackTellsASerializationFailure(t *testing.T) {
	forEach(t, func(w *world) {
		if _, err := w.Pool.Exec(w.Context(), `insert into account values ($1, 1)`, w.name); err != nil {
			w.Fatal(err)
		}
		s := w.begin(&sql.TxOptions{Isolation: sql.LevelRepeatableRead})
		var balance int
		if err := s.view.QueryRow(w.Context(), `select balance from account where id = $1`, w.name).Scan(&balance); err != nil {
			w.Fatal(err)
		}
		if _, err := w.Pool.Exec(w.Context(), `update account set balance = 2 where id = $1`, w.name); err != nil {
			w.Fatal(err)
		}
		_, err := inbox.Handle(w.Context(), s.view, w.id, func(ctx context.Context) (int, error) {
			_, err := s.tx.ExecContext(ctx, fmt.Sprintf(`update account set balance = 3 where id = '%s'`, w.name))
			return 1, err
		})
		if !errors.Is(err, inbox.ErrUnavailable) || !inbox.Retryable(err) {
			w.Error(err)
		}
		_ = s.tx.Commit()
		w.want(0, "", 0)
	})
}

// The whole life of a failed message: recorded outside, requeued, run again in the stack's transaction, marked by hand.
func TestA5_EveryStackGoesOnAfterAFailure(t *testing.T) {
	forEach(t, func(w *world) {
		box := w.box()
		s := w.begin(nil)
		fail := func(context.Context) (string, error) { return "", errMine }
		_, err := inbox.Handle(w.Context(), s.view, w.id, fail, inbox.Using(box), inbox.WithFingerprint([]byte{1, 0, 255}))
		_ = s.tx.Rollback()
		if err := inbox.RecordFailure(w.Context(), box, inbox.Message{ID: w.id, Payload: []byte("p")}, err); !errors.Is(err, inbox.ErrFailed) {
			w.Fatal(err)
		}
		w.want(0, "failed 1", 0)
		s = w.begin(nil)
		if _, err := inbox.Handle(w.Context(), s.view, w.id, fail, inbox.Using(box)); !errors.Is(err, inbox.ErrNotDue) {
			w.Fatal(err)
		}
		_ = s.tx.Rollback()
		if _, err := box.Requeue(w.Context(), w.id, ""); err != nil {
			w.Fatal(err)
		}
		s = w.begin(nil)
		got, err := inbox.Handle(w.Context(), s.view, w.id, func(ctx context.Context) (string, error) { return "second", s.write(ctx) },
			inbox.Using(box), inbox.WithFingerprint([]byte{1, 0, 254}))
		if err != nil || got.Value != "second" {
			w.Fatalf("%v, %v", got, err)
		}
		_, err = inbox.Handle(w.Context(), s.view, w.id, fail, inbox.Using(box), inbox.WithFingerprint([]byte{1, 0, 255}))
		if !errors.Is(err, inbox.ErrPayloadMismatch) {
			w.Errorf("another fingerprint: %v", err)
		}
		byHand := inbox.ID{Consumer: "by hand", Message: w.name}
		if err := inbox.MarkCompleted(w.Context(), s.view, byHand, "done", "why"); err != nil {
			w.Error(err)
		}
		s.commit()
		w.want(1, "completed 1", 0) // a requeued message has all its attempts again
		if got, done, err := inbox.IsCompleted[string](w.Context(), box, byHand); got != "done" || !done || err != nil {
			w.Errorf("%q, %v, %v", got, done, err)
		}
		discarded := inbox.ID{Consumer: "discarded", Message: w.name}
		if err := inbox.RecordFailure(w.Context(), box, inbox.Message{ID: discarded}, errMine); !errors.Is(err, inbox.ErrFailed) {
			w.Error(err)
		}
		if err := box.Discard(w.Context(), discarded, ""); err != nil {
			w.Error(err)
		}
		s = w.begin(nil)
		if _, err := inbox.Handle(w.Context(), s.view, discarded, fail); !errors.Is(err, inbox.ErrDead) {
			w.Error(err)
		}
	})
}

func TestA5_EveryStackKeepsCommitOrder(t *testing.T) {
	forEach(t, func(w *world) {
		box, err := outbox.New(outbox.Config{CommitOrder: true})
		if err != nil {
			w.Fatal(err)
		}
		s := w.begin(nil)
		sent := messages(w.name)
		if _, err := box.Enqueue(w.Context(), s.view, sent...); err != nil {
			w.Fatal(err)
		}
		s.commit()
		w.wantSent(sent)
	})
}

func TestA6_EveryStackNoticesAnotherVersion(t *testing.T) {
	forEach(t, func(w *world) {
		if _, err := w.Pool.Exec(w.Context(), `insert into account values ($1, 1)`, w.name); err != nil {
			w.Fatal(err)
		}
		row := optimistic.Row{Look: `select version from account where id = $1`, Key: []any{w.name}}
		const update = `update account set balance = $3, version = version + 1 where id = $1 and version = $2 returning version`
		s := w.begin(nil)
		if got, err := optimistic.Exec(w.Context(), s.view, row, 1, update, 5); got != 2 || err != nil {
			w.Errorf("%d, %v", got, err)
		}
		if _, err := optimistic.Exec(w.Context(), s.view, row, 1, update, 6); !errors.Is(err, optimistic.ErrConflict) {
			w.Error(err)
		}
		if got, err := optimistic.Advance(w.Context(), s.view, "document", w.name, 0); got != 1 || err != nil {
			w.Errorf("%d, %v", got, err)
		}
		if _, err := optimistic.Advance(w.Context(), s.view, "document", w.name, 0); !errors.Is(err, optimistic.ErrConflict) {
			w.Error(err)
		}
		if got, err := optimistic.Current(w.Context(), s.view, "document", w.name); got != 1 || err != nil {
			w.Errorf("%d, %v", got, err)
		}
		s.commit()
		if got := one[int](w, `select balance from account where id = $1`, w.name); got != 5 {
			w.Error(got)
		}
	})
}
