package inbox

import "time"

// Stage is how far a change of the mode is. Replicas follow it one by one, and each mode knows only what it has written
// itself, so that a change at one instant would forget what the other one knows.
type Stage uint8

const (
	StageSettled Stage = iota // only the mode's own store is used
	StageBoth                 // messages are taken in both stores, because some replica may still use the former one alone
	StageHistory              // what the former store knows is still read, until no old message can come again
)

var stageNames = [...]string{"settled", "both", "history"}

// String returns the stage's name.
func (s Stage) String() string {
	if int(s) < len(stageNames) {
		return stageNames[s]
	}
	return "invalid"
}

const (
	// aliveFor is for how long a replica that was seen is waited for, and a change is not over.
	aliveFor = 30 * time.Second
	// freshFor is for how long a replica trusts what it has learned. It is half of aliveFor, so that it is careful before
	// the others stop to wait for it.
	freshFor = aliveFor / 2
)

// stage says how far the last change of a mode is, for how long ago it was written, whether all replicas work by it and
// how long a lease of the former mode may last.
func stage(since time.Duration, followed bool, lease, horizon time.Duration) Stage {
	overlap := aliveFor + lease // in which the former mode may still finish messages
	switch {
	case since < 0:
		return StageSettled
	case !followed || since < overlap:
		return StageBoth
	case since < overlap+horizon:
		return StageHistory
	}
	return StageSettled
}

// stage says how far the change is that a consumer's policy is in. A mode does not wait for the store that it uses itself.
func (s *Standing) stage(passed time.Duration, followed bool, lease time.Duration) Stage {
	left := s.guardLeft
	switch s.Mode {
	case ModeCache:
		left = s.tableLeft
	case ModeOff:
		return StageSettled
	}
	if left >= 0 {
		left += passed
	}
	return stage(left, followed, lease, s.RetryHorizon)
}

// guards is what a message passes on its way to the handler.
type guards struct {
	front     bool // the cache in front of the table is asked, and filled
	token     bool // a token is taken in Redis before the row, and finished after the commit
	readToken bool // what was finished in Redis is an answer
	row       bool // the row is claimed
	readRow   bool // what the table knows is an answer
}

// guardsOf says what guards a message in a mode and a stage.
func guardsOf(mode Mode, at Stage) guards {
	switch mode {
	case ModePostgres, ModeDouble:
		return guards{front: mode == ModeDouble, row: true, token: at == StageBoth, readToken: at == StageHistory}
	case ModeCache:
		return guards{token: true, row: at == StageBoth, readRow: at == StageHistory}
	}
	return guards{}
}
