// Package migrations holds the schema as SQL files in goose's format, for use with goose or any other tool.
//
// The package imports no migration tool. Package migrate runs the files with goose's Provider; who runs them in another
// way creates the schema commitbox first.
//
// # Rights
//
// The migrations run as the owner of the schema, who needs CREATE on the database once. The library itself makes no
// objects, so a service runs as a role that has these rights and no others. To enqueue:
//
//	grant usage on schema commitbox to producer;
//	grant usage on sequence commitbox.outbox_seq to producer;
//	grant insert on commitbox.outbox_message to producer;
//	grant insert on commitbox.outbox_scheduled to producer;
//
// To run a relay:
//
//	grant usage on schema commitbox to relay;
//	grant usage on sequence commitbox.outbox_seq to relay;
//	grant usage on sequence commitbox.outbox_epoch to relay;
//	grant select, insert, delete on commitbox.outbox_message to relay;
//	grant select, update, delete on commitbox.outbox_scheduled to relay;
//	grant insert on commitbox.outbox_sent to relay;
//	grant execute on function commitbox.outbox_sent_days(integer, integer) to relay;
//	grant select, insert, update on commitbox.outbox_channel to relay;
//	grant select, insert, update on commitbox.outbox_shard to relay;
//	grant select, insert, update, delete on commitbox.outbox_relay to relay;
//	grant select, insert, update, delete on commitbox.outbox_blocked to relay;
//	grant select, insert, update, delete on commitbox.outbox_deferred to relay;
//	grant select, insert, delete on commitbox.outbox_dead to relay;
//
// To handle messages in transaction mode:
//
//	grant usage on schema commitbox to consumer;
//	grant select, insert, update on commitbox.inbox to consumer;
//	grant select on commitbox.inbox_step to consumer;
//
// To advance versions with package optimistic:
//
//	grant usage on schema commitbox to editor;
//	grant select, insert, update on commitbox.resource_version to editor;
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
