// Package schema describes the table that the tests write to.
package schema

import (
	"entgo.io/ent"
	"entgo.io/ent/schema/field"
)

// Effect is what a handler writes.
type Effect struct{ ent.Schema }

// Fields of an Effect: its id is made by the table.
func (Effect) Fields() []ent.Field { return []ent.Field{field.String("note")} }
