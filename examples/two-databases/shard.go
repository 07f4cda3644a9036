package main

import (
	"hash/fnv"

	"github.com/commitbox/commitbox/examples/internal/exampledb"
	"github.com/commitbox/commitbox/inbox"
)

// shard is one database with its own accounts, outbox and inbox.
type shard struct {
	*exampledb.DB
	number int
	box    *inbox.Box
}

// shards routes: every account lives in the database that its name says, and everything that concerns it happens there.
// With another number of databases the names lead elsewhere, so accounts have to be moved before it changes.
type shards []*shard

func (s shards) of(account string) *shard {
	h := fnv.New32a()
	h.Write([]byte(account))
	return s[h.Sum32()%uint32(len(s))]
}
