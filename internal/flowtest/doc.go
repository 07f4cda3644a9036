// Package flowtest tests the whole way of a message, from the migrator to the handler, under what an installation may
// put around it: a transaction pooler, every way in which pgx sends statements, another schema, a role with few rights.
package flowtest
