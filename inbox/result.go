package inbox

import (
	"encoding/json"
	"fmt"
	"reflect"

	"github.com/commitbox/commitbox"
)

// Void is the result type of a handler that has no answer: nothing is stored, and a replay has the zero value.
type Void = struct{}

// Versioned is implemented by result types whose shape changes, with a value or a pointer receiver. A stored result of
// another version is an error (ErrNoResult) and is not read into the new shape. ResultVersion is asked of a zero value,
// so it must not depend on the receiver. It counts where the result type itself has it, not where that is an interface.
type Versioned interface {
	ResultVersion() byte
}

// The first byte of a stored result.
const (
	codecJSON      = 1 // JSON follows
	codecBytes     = 2 // the bytes of a []byte follow
	codecVersioned = 3 // a version byte, then JSON
)

// encode returns the stored form of a value; nil for Void. The form follows from the type R alone, because a replay knows
// nothing else: under an interface type everything is JSON.
func encode[R any](value R, limit int) ([]byte, error) {
	switch v := any(&value).(type) {
	case *Void:
		return nil, nil
	case *[]byte:
		return limited(append([]byte{codecBytes}, *v...), limit)
	}
	body, err := json.Marshal(value)
	if err != nil {
		return nil, fmt.Errorf("encode the result: %w", err)
	}
	return limited(append(headOf[R](), body...), limit)
}

// headOf returns what stands before the JSON of a type.
func headOf[R any]() []byte {
	t := reflect.TypeFor[R]()
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if v, ok := reflect.New(t).Interface().(Versioned); ok {
		return []byte{codecVersioned, v.ResultVersion()}
	}
	return []byte{codecJSON}
}

func limited(stored []byte, limit int) ([]byte, error) {
	if size := len(stored) - 1; size > limit {
		return nil, &commitbox.InputError{Field: "result", Problem: "is too large", Size: size, Limit: limit}
	}
	return stored, nil
}

// decode reads a stored form. Its errors match ErrNoResult, a panic of the type's own methods too.
func decode[R any](stored []byte) (value R, err error) {
	defer func() {
		if recovered := recover(); recovered != nil {
			value, err = *new(R), fmt.Errorf("%w: the type panicked: %v", ErrNoResult, recovered)
		}
	}()
	switch target := any(&value).(type) {
	case *Void:
		return value, nil
	case *[]byte:
		body, err := bodyOf(stored, codecBytes)
		*target = append([]byte{}, body...)
		return value, err
	}
	body, err := bodyOf(stored, headOf[R]()...)
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
