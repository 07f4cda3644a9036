package outboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/commitbox/commitbox/outbox"
)

// records makes messages, one for each key.
func records(keys ...string) []outbox.Record {
	batch := make([]outbox.Record, len(keys))
	for i, key := range keys {
		batch[i] = outbox.Record{Position: int64(i + 1), EnqueuedAt: time.Now(), Attempt: 1, Message: outbox.Message{
			ID: uuid.New(), Channel: outbox.DefaultChannel, Topic: "outboxtest.topic", Key: key, ContentType: "application/octet-stream",
			Headers: map[string]string{"outboxtest-a": "1", "outboxtest-b": "ü ≠ \"u\""}, Payload: fmt.Appendf(nil, "payload \x00\xff %d", i),
		}}
	}
	return batch
}

// confirm publishes a batch in which nothing may fail.
func (s Subject) confirm(batch []outbox.Record) error {
	ctx, cancel := s.deadline()
	defer cancel()
	errs, err := s.publish(ctx, batch)
	return errors.Join(append(errs, err)...)
}

func holdsWhatItConfirmed(s Subject) error {
	batch := records("a", "b", "", "c")
	if err := s.confirm(batch); err != nil {
		return err
	}
	held := s.received()
	for i, r := range batch {
		copies := held[r.ID.String()]
		if len(copies) != 1 {
			return fmt.Errorf("message %d is held %d times", i+1, len(copies))
		}
		if err := s.same(r, copies[0]); err != nil {
			return fmt.Errorf("message %d: %w", i+1, err)
		}
	}
	return nil
}

// same compares the fields that the destination can hold.
func (s Subject) same(sent, got outbox.Record) error {
	for field, equal := range map[string]bool{
		"Topic": sent.Topic == got.Topic, "Key": sent.Key == got.Key, "ContentType": sent.ContentType == got.ContentType,
		"Payload": bytes.Equal(sent.Payload, got.Payload), "Headers": containsAll(got.Headers, sent.Headers),
	} {
		if !equal && !slices.Contains(s.OmitFields, field) {
			return fmt.Errorf("%s differs: sent %+v, held %+v", field, sent.Message, got.Message)
		}
	}
	return nil
}

// containsAll allows headers that the publisher adds.
func containsAll(got, sent map[string]string) bool {
	for name := range maps.Keys(sent) {
		if got[name] != sent[name] {
			return false
		}
	}
	return true
}

func takesEmptyBatch(s Subject) error { return s.confirm(nil) }

func keepsOrderOfCalls(s Subject) error {
	var sent []string
	for range 20 {
		batch := records("k")
		if err := s.confirm(batch); err != nil {
			return err
		}
		sent = append(sent, batch[0].ID.String())
	}
	var got []string
	for _, r := range s.Received() {
		got = append(got, r.ID.String())
	}
	if !slices.Equal(sent, got) {
		return fmt.Errorf("sent %v, held %v", sent, got)
	}
	return nil
}

func worksConcurrently(s Subject) error {
	var group sync.WaitGroup
	failures := make([]error, 8)
	for i := range failures {
		group.Go(func() {
			for range 5 {
				failures[i] = errors.Join(failures[i], s.confirm(records("a", "b", "c")))
			}
		})
	}
	group.Wait()
	if err := errors.Join(failures...); err != nil {
		return err
	}
	if n := len(s.Received()); n != 8*5*3 {
		return fmt.Errorf("%d messages are held, want %d", n, 8*5*3)
	}
	return nil
}

func obeysEndedContext(s Subject) error {
	ctx, cancel := s.deadline()
	cancel()
	started := time.Now()
	if _, err := s.publish(ctx, records("a", "b")); err != nil { // whatever is confirmed has to be held
		return err
	}
	if took := time.Since(started); took > 5*time.Second {
		return fmt.Errorf("a call whose context had ended took %v", took)
	}
	return s.confirm(records("c"))
}

func reportsRefusals(s Subject) error {
	const size = 4
	for position := range size {
		batch := records("a", "b", "c", "d")
		bad := batch[position].ID
		s.Refuse(func(r outbox.Record) bool { return r.ID == bad })
		ctx, cancel := s.deadline()
		errs, err := s.publish(ctx, batch)
		cancel()
		if err != nil {
			return fmt.Errorf("refusal at %d of %d: %w", position+1, size, err)
		}
		if errs[position] == nil {
			return fmt.Errorf("the refused message at %d of %d was called confirmed", position+1, size)
		}
		if errors.Is(errs[position], outbox.ErrNotTried) || outbox.IsUnavailable(errs[position]) {
			return fmt.Errorf("the refused message at %d of %d counts no attempt, so it would be tried for ever: %w", position+1, size, errs[position])
		}
		s.Refuse(func(outbox.Record) bool { return false })
		if err := s.confirm(records("e")); err != nil {
			return fmt.Errorf("after a refusal: %w", err)
		}
	}
	return nil
}

func stopsKey(s Subject) error {
	orderer, ok := s.Publisher.(outbox.KeyOrderer)
	if !ok || !orderer.StopsKeyAtFirstFailure() {
		return nil
	}
	const size = 4
	for position := range size {
		batch := records("k", "k", "k", "k")
		bad := batch[position].ID
		s.Refuse(func(r outbox.Record) bool { return r.ID == bad })
		ctx, cancel := s.deadline()
		errs, err := s.publish(ctx, batch)
		cancel()
		if err != nil {
			return err
		}
		held := s.received()
		for i, r := range batch {
			switch {
			case i < position && errs[i] != nil:
				return fmt.Errorf("message %d before the refused one failed: %w", i+1, errs[i])
			case i >= position && (errs[i] == nil || len(held[r.ID.String()]) > 0):
				return fmt.Errorf("message %d was sent although message %d of its key was refused", i+1, position+1)
			}
		}
	}
	return nil
}

func reportsAbsence(s Subject) error {
	if err := s.confirm(records("a")); err != nil {
		return fmt.Errorf("before: %w", err)
	}
	s.Away(true)
	ctx, cancel := s.deadline()
	errs, err := s.publish(ctx, records("b", "c"))
	cancel()
	if err != nil {
		return err
	}
	for i, err := range errs {
		if err == nil {
			return fmt.Errorf("message %d was confirmed by a destination that is away", i+1)
		}
	}
	s.Away(false)
	return s.recovers()
}

// recovers waits until the same publisher works again.
func (s Subject) recovers() (err error) {
	for deadline := time.Now().Add(s.Timeout); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if err = s.confirm(records("z")); err == nil {
			return nil
		}
	}
	return fmt.Errorf("the destination is back, and the publisher does not recover: %w", err)
}

func givesUpOnSilence(s Subject) error {
	if err := s.confirm(records("a")); err != nil {
		return fmt.Errorf("before: %w", err)
	}
	s.Silent(true)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	errs, err := s.publish(ctx, records("b", "c"))
	cancel()
	if err != nil {
		return err
	}
	for i, err := range errs {
		if err == nil {
			return fmt.Errorf("message %d was confirmed although nothing was answered", i+1)
		}
	}
	s.Silent(false)
	return s.recovers()
}
