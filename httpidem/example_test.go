package httpidem_test

import (
	"context"
	"net/http"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/httpidem"
)

type userKey struct{}

// A route that creates orders. Whatever authenticates the caller runs before it.
func ExampleMiddleware_Handle() {
	routes := func(pool *pgxpool.Pool) (http.Handler, error) {
		once, err := httpidem.New(pool, httpidem.Config{
			Name: "orders",
			Scope: func(r *http.Request) (string, error) {
				user, _ := r.Context().Value(userKey{}).(string)
				return user, nil
			},
		})
		if err != nil {
			return nil, err
		}
		mux := http.NewServeMux()
		mux.Handle("POST /orders", once.Handle(func(w http.ResponseWriter, r *http.Request, tx pgx.Tx) error {
			id, err := insertOrder(r.Context(), tx)
			if err != nil {
				return err // rolled back, 500
			}
			w.Header().Set("Location", "/orders/"+id)
			w.WriteHeader(http.StatusCreated)
			return nil
		}))
		return mux, nil
	}
	_ = routes
}

func insertOrder(ctx context.Context, tx pgx.Tx) (id string, err error) {
	err = tx.QueryRow(ctx, `insert into orders default values returning id::text`).Scan(&id)
	return id, err
}
