package inbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/internal/check"
	"github.com/commitbox/commitbox/internal/db"
)

const (
	pageDefault = 100
	pageMax     = 1000
)

// Filter selects rows for List. Ages count by the database's clock. Not promised: that the cursor of another consumer's or
// status's list is refused; it is taken for a time and an id of this one.
type Filter struct {
	Consumer  string        // required
	Status    Status        // required
	OlderThan time.Duration // received (pending, failed) or ended (completed, dead) at least so long ago
	After     Cursor        // of the last entry of the page before; zero: from the start
	Limit     int           // entries of a page; default 100, at most 1000
}

// Cursor is a position in a list. It stays valid while rows come and go.
type Cursor struct {
	At      time.Time
	Message string
}

// Cursor returns the entry's position in a list of its status.
func (e Entry) Cursor() Cursor {
	if e.Status == StatusCompleted || e.Status == StatusDead {
		return Cursor{e.FinishedAt, e.ID.Message}
	}
	return Cursor{e.ReceivedAt, e.ID.Message}
}

// List returns a page of a consumer's rows of one status, the oldest first, without their payloads. A page that is not
// full is the last one. The SQL function inbox_list says the same. Not promised: one snapshot of several pages; a row that
// changes its status meanwhile may be missed or be in two lists.
func (b *Box) List(ctx context.Context, f Filter) ([]Entry, error) {
	if f.Limit == 0 {
		f.Limit = pageDefault
	}
	if err := errors.Join(b.check(), f.check()); err != nil {
		return nil, err
	}
	rows, err := db.New(b.schema.On(b.pool)).InboxList(ctx, db.InboxListParams{
		Consumer: f.Consumer, Status: string(f.Status), OlderSeconds: f.OlderThan.Seconds(),
		AfterAt: f.After.At, AfterID: f.After.Message, Page: int32(f.Limit),
	})
	entries := make([]Entry, len(rows))
	for i, row := range rows {
		entries[i] = Entry{
			ID: ID{f.Consumer, row.MessageID}, Status: f.Status, Attempts: int(row.Attempts), ReceivedAt: row.ReceivedAt,
			FinishedAt: row.FinishedAt, DueAt: row.DueAt, LastError: row.LastError, PayloadKept: row.PayloadKept,
		}
	}
	return entries, err
}

func (f *Filter) check() error {
	err := check.Text("Filter.Consumer", f.Consumer, consumerLenMax)
	switch f.Status {
	case StatusPending, StatusCompleted, StatusFailed, StatusDead:
	default:
		err = errors.Join(err, &commitbox.InputError{Field: "Filter.Status", Problem: "must be pending, completed, failed or dead"})
	}
	if f.Limit < 1 || f.Limit > pageMax {
		err = errors.Join(err, &commitbox.InputError{Field: "Filter.Limit", Problem: "must be 1 to 1000"})
	}
	return err
}

func readHeaders(text string) (map[string]string, error) {
	var headers map[string]string
	if err := json.Unmarshal([]byte(text), &headers); err != nil {
		return nil, fmt.Errorf("inbox: the row's headers are not an object of strings: %w", err)
	}
	return headers, nil
}
