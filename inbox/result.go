package inbox

import (
	"encoding/json"
	"fmt"

	"github.com/commitbox/commitbox"
)

// Void is the result type of a handler that has no answer: nothing is stored, and a replay has the zero value.
type Void = struct{}

// Versioned is implemented by result types whose shape changes. A stored result of another version is an error
// (ErrNoResult) and is not read into the new shape.
type Versioned interface {
	ResultVersion() byte
}

// The first byte of a stored result.
const (
	codecJSON      = 1 // JSON follows
	codecBytes     = 2 // the bytes of a []byte follow
	codecVersioned = 3 // a version byte, then JSON
)

// encode returns the stored form of a value; nil for Void.
func encode[R any](value R, limit int) ([]byte, error) {
	var head []byte
	switch v := any(value).(type) {
	case Void:
		return nil, nil
	case []byte:
		return limited(append([]byte{codecBytes}, v...), limit)
	case Versioned:
		head = []byte{codecVersioned, v.ResultVersion()}
	default:
		head = []byte{codecJSON}
	}
	body, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encode the result: %w", err)
	}
	return limited(append(head, body...), limit)
}

func limited(stored []byte, limit int) ([]byte, error) {
	if size := len(stored) - 1; size > limit {
		return nil, &commitbox.InputError{Field: "result", Problem: "is too large", Size: size, Limit: limit}
	}
	return stored, nil
}

// decode reads a stored form. Its errors match ErrNoResult.
func decode[R any](stored []byte) (value R, err error) {
	switch target := any(&value).(type) {
	case *Void:
		return value, nil
	case *[]byte:
		body, err := bodyOf(stored, codecBytes)
		*target = append([]byte{}, body...)
		return value, err
	}
	head := []byte{codecJSON}
	if v, ok := any(value).(Versioned); ok {
		head = []byte{codecVersioned, v.ResultVersion()}
	}
	body, err := bodyOf(stored, head...)
	if err != nil {
		return value, err
	}
	if err := json.Unmarshal(body, &value); err != nil {
		return *new(R), fmt.Errorf("%w: %w", ErrNoResult, err)
	}
	return value, nil
}

// bodyOf returns what follows the head that the asked type has.
func bodyOf(stored []byte, head ...byte) ([]byte, error) {
	if len(stored) < len(head) {
		return nil, fmt.Errorf("%w: the row has none", ErrNoResult)
	}
	if found := stored[:len(head)]; string(found) != string(head) {
		return nil, fmt.Errorf("%w: it has the format %v, the type asks for %v", ErrNoResult, found, head)
	}
	return stored[len(head):], nil
}
