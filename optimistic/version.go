package optimistic

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
	"github.com/commitbox/commitbox/internal/schema"
)

// Limits of a resource's name, in bytes; the table has the same.
const (
	typeLenMax = 200
	idLenMax   = 512
)

// Versions keeps the versions of resources that have no version column, in the table resource_version. It is safe for
// concurrent use and needs no closing.
type Versions struct{ schema schema.Name }

// New returns the versions in a schema of your choice; empty means "commitbox". For that one, [Advance] and [Current] do.
func New(schemaName string) (*Versions, error) {
	name, err := schema.Parse(schemaName)
	if err != nil {
		return nil, &commitbox.InputError{Field: "schemaName", Problem: err.Error()}
	}
	return &Versions{name}, nil
}

var standard Versions

// Advance raises the version of a resource in the schema commitbox; see [Versions.Advance].
func Advance(ctx context.Context, tx pgx.Tx, typ, id string, expected int64) (int64, error) {
	return standard.Advance(ctx, tx, typ, id, expected)
}

// Current reads the version of a resource in the schema commitbox; see [Versions.Current].
func Current(ctx context.Context, tx pgx.Tx, typ, id string) (int64, error) {
	return standard.Current(ctx, tx, typ, id)
}

// Advance raises the version of a resource by one if it is the expected one, and returns the new one. Who gets it without
// an error is the only one to get that version, if tx commits, and no other transaction can advance the resource until tx
// ends. A resource that was never advanced is at version 0. What the error says:
//
//   - ErrConflict: the resource is at another version, or another transaction is changing it (Error.Pending)
//   - ErrNotFound: a version above 0 was expected, and the resource has none
//   - an [*commitbox.InputError]: an argument was refused before anything was sent. typ has 1 to 200 bytes and id 1 to
//     512, valid UTF-8 without NUL
//   - any other error is PostgreSQL's and has aborted tx; see [Exec]
//
// After the first three, tx is as it was and can go on. Advance never waits for another transaction, so transactions that
// advance several resources do not deadlock by it. It takes one round trip, and a second one if nothing was changed.
func (v *Versions) Advance(ctx context.Context, tx pgx.Tx, typ, id string, expected int64) (int64, error) {
	if err := errors.Join(check.Tx(ctx, tx), checkResource(typ, id), checkVersion(expected)); err != nil {
		return 0, err
	}
	q := db.New(v.schema.On(tx))
	var version int64
	var err error
	if expected == 0 {
		version, err = q.VersionCreate(ctx, db.VersionCreateParams{Type: typ, ID: id})
	} else {
		version, err = q.VersionAdvance(ctx, db.VersionAdvanceParams{Type: typ, ID: id, Expected: expected})
	}
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, explain(ctx, q, typ, id, expected)
	case err != nil:
		return 0, failed("advance", typ, id, err)
	}
	return version, nil
}

// explain says why a resource was not advanced.
func explain(ctx context.Context, q *db.Queries, typ, id string, expected int64) error {
	actual, err := current(ctx, q, typ, id)
	if err != nil {
		return err
	}
	e := &Error{Resource: typ + "/" + id, Expected: expected, Actual: actual, Pending: actual == expected, reason: ErrConflict}
	if actual == 0 && expected > 0 {
		e.reason = ErrNotFound
	}
	return e
}

// Current returns the version of a resource; 0 if it was never advanced. Read the version first and then what it stands
// for: what is changed in between is noticed by [Versions.Advance]. The other way round it is not.
func (v *Versions) Current(ctx context.Context, tx pgx.Tx, typ, id string) (int64, error) {
	if err := errors.Join(check.Tx(ctx, tx), checkResource(typ, id)); err != nil {
		return 0, err
	}
	return current(ctx, db.New(v.schema.On(tx)), typ, id)
}

func current(ctx context.Context, q *db.Queries, typ, id string) (int64, error) {
	version, err := q.VersionLook(ctx, db.VersionLookParams{Type: typ, ID: id})
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return 0, failed("read", typ, id, err)
	}
	return version, nil
}

func failed(what, typ, id string, err error) error {
	return fmt.Errorf("optimistic: %s the version of %s/%s: %w", what, typ, id, check.Ended(err))
}

func checkResource(typ, id string) error {
	return errors.Join(check.Text("typ", typ, typeLenMax), check.Text("id", id, idLenMax))
}
