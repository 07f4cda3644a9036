// Package rights tells a program, when it starts, which rights its role in the database lacks for its work, so that a missing
// one is not found by the first message that needs it. How rights are granted is in the documentation of package migrations.
package rights

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// Work is what a role does.
type Work string

const (
	Produce  Work = "produce"  // enqueues messages
	Relay    Work = "relay"    // runs relays
	Consume  Work = "consume"  // handles messages, in every mode
	Edit     Work = "edit"     // advances versions with package optimistic
	Schedule Work = "schedule" // runs jobs
	Cleanup  Work = "cleanup"  // cleans up
	Observe  Work = "observe"  // reads everything but contents
)

// MissingError says what a role lacks. A person has to grant it; a retry is not worth it before.
type MissingError struct {
	Missing []string // the statements for the owner of the schema, each of which gives one right
}

func (e *MissingError) Error() string {
	return "commitbox: the database role lacks rights; run as the owner of the schema: " + strings.Join(e.Missing, "; ")
}

// Check returns nil if the role of the pool's connections has all rights for the works, and a *MissingError if it lacks some.
// An empty schema is "commitbox". A role that may not use the schema at all, or a schema that was not migrated, is the
// database's error. It reads the catalogue in one round trip for each work, changes nothing, and is safe for concurrent use.
//
// Not promised: that the rights are still there later.
func Check(ctx context.Context, pool *pgxpool.Pool, schemaName string, works ...Work) error {
	name, err := schema.Parse(schemaName)
	if err != nil {
		return err
	}
	var missing []string
	for _, work := range works {
		lacking, err := db.New(name.On(pool)).MissingRights(ctx, string(work))
		if err != nil {
			return fmt.Errorf("commitbox: look at the rights to %s: %w", work, err)
		}
		missing = append(missing, lacking...)
	}
	if len(missing) > 0 {
		return &MissingError{missing}
	}
	return nil
}

// Explain returns err, and if the database has refused something for want of a right (42501), joined with what [Check] says
// now: for the error of a relay's RunOnce, of inbox.Process, or of whatever else the role does. PostgreSQL itself names the
// table or function, and not which right to it. With any other err, nil too, it asks nothing.
//
// Not promised: a [MissingError] for a right that none of the works needs, such as one on a table of the program's own.
func Explain(ctx context.Context, pool *pgxpool.Pool, schemaName string, err error, works ...Work) error {
	var refused *pgconn.PgError
	if !errors.As(err, &refused) || refused.Code != "42501" {
		return err
	}
	var missing *MissingError
	if errors.As(Check(ctx, pool, schemaName, works...), &missing) {
		return errors.Join(err, missing)
	}
	return err
}
