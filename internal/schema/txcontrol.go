package schema

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
