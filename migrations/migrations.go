// Package migrations holds the schema as SQL files in goose's format, for use with goose or any other tool.
//
// The package imports no migration tool. Package migrate runs the files with goose's Provider; who runs them in another
// way creates the schema commitbox first.
//
// # Rights
//
// The migrations run as the owner of the schema, who needs CREATE on the database once. The library itself makes no
// objects, so a service runs as a role that has the rights of its work and no others. Roles belong to the whole server, so they
// are not made here; the owner of the schema grants to those that there are, and again after each migration:
//
//	select commitbox.grant_rights('produce', 'shop');         -- to enqueue
//	select commitbox.grant_rights('relay', 'shop_relay');     -- to run a relay
//	select commitbox.grant_rights('consume', 'billing');      -- to handle messages, in every mode
//	select commitbox.grant_rights('edit', 'billing');         -- to advance versions with package optimistic
//	select commitbox.grant_rights('schedule', 'billing');     -- to run jobs
//	select commitbox.grant_rights('cleanup', 'shop_cleanup'); -- to clean up; as a job with 'schedule' too
//	select commitbox.grant_rights('observe', 'dashboard');    -- to read everything but payloads, headers, results, keys and error texts
//	select commitbox.grant_rights('migrate', 'shop_owner');   -- to own the schema, and so to migrate it
//
// commitbox.rights('relay') lists what is granted. commitbox.missing_rights('relay') lists what the session's role lacks, as the
// statements that would grant it; package rights asks it when a program starts. "drop owned by shop_relay" takes everything back.
//
// Whoever cleans up has a role of its own, which reads no content. Row security keeps it from removing anything but completed
// and dead inbox rows and discarded messages, whatever statement it sends. From then on the tables inbox and outbox_dead can
// be dumped and copied into by owners and superusers only; other roles notice nothing else.
//
// Operators have the rights on every table.
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
