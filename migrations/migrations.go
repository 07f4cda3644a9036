// Package migrations holds the schema as SQL files in goose's format, for use with goose or any other tool.
//
// The package imports no migration tool. Package migrate runs the files with goose's Provider; who runs them in another
// way creates the schema commitbox first.
package migrations

import "embed"

// FS holds the migrations, named as goose wants them, in its root.
//
//go:embed *.sql
var FS embed.FS

// Bootstrap holds what package migrate creates before the first migration: the schema and the migrators' lock.
//
//go:embed bootstrap/*.sql
var Bootstrap embed.FS
