package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
)

// fault takes one database away for a while: its connections end, and it takes no new ones.
type fault struct {
	serverURL string
	away      *shard
	others    shards
	meanwhile int // transfers that arrived in the other databases while it was away
	over      atomic.Bool
}

// An outage lasts until the others have gone on without the database, within limits.
const (
	outageMin = time.Second
	outageMax = 20 * time.Second
	goneOn    = 5 // transfers
)

func (f *fault) inject(ctx context.Context, all shards) error {
	for arrived := 0; arrived < transfers/4; {
		n, err := arrivedIn(ctx, all)
		if err != nil {
			return fmt.Errorf("wait for the outage: %w", err)
		}
		arrived = n
		time.Sleep(lookEvery)
	}
	conn, err := pgx.Connect(ctx, f.serverURL)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	database := pgx.Identifier{f.away.Name}.Sanitize()
	if _, err := conn.Exec(ctx, "alter database "+database+" allow_connections false"); err != nil {
		return err
	}
	defer func() { // whatever happens, the database comes back
		if _, backErr := conn.Exec(context.WithoutCancel(ctx), "alter database "+database+" allow_connections true"); backErr == nil {
			f.over.Store(true)
		}
	}()
	if _, err := conn.Exec(ctx, `select pg_terminate_backend(pid) from pg_stat_activity where datname = $1`, f.away.Name); err != nil {
		return err
	}
	before, err := arrivedIn(ctx, f.others)
	if err != nil {
		return err
	}
	for began := time.Now(); time.Since(began) < outageMin || f.meanwhile < goneOn && time.Since(began) < outageMax; time.Sleep(lookEvery) {
		after, err := arrivedIn(ctx, f.others)
		if err != nil {
			return err
		}
		f.meanwhile = after - before
	}
	return nil
}

func arrivedIn(ctx context.Context, s shards) (all int, err error) {
	for _, shard := range s {
		var n int
		if err := shard.QueryRow(ctx, `select count(*) from arrived`).Scan(&n); err != nil {
			return 0, err
		}
		all += n
	}
	return all, nil
}
