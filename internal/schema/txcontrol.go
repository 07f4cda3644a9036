package schema

import "strconv"

// The words that control a transaction: the only statements that stand outside queries/ and migrations/.
const (
	// Begin opens a transaction at the level that the library is written for, whatever the session's default is.
	Begin             = "begin isolation level read committed"
	Commit            = "commit"
	Rollback          = "rollback"
	Savepoint         = "savepoint commitbox"
	ReleaseSavepoint  = "release savepoint commitbox"
	RollbackSavepoint = "rollback to savepoint commitbox"
	// Spoil fails, because nobody sets that savepoint: the transaction it is sent in can only be rolled back.
	Spoil = "rollback to savepoint commitbox_spoilt"
)

// NumberedSavepoint sets a savepoint of its own.
func NumberedSavepoint(n int64) string { return "savepoint " + numbered(n) }

// ReleaseNumbered ends one and keeps what came after it.
func ReleaseNumbered(n int64) string { return "release savepoint " + numbered(n) }

// RollbackNumbered takes back what came after one.
func RollbackNumbered(n int64) string { return "rollback to savepoint " + numbered(n) }

func numbered(n int64) string { return "commitbox_" + strconv.FormatInt(n, 10) }
