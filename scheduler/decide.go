package scheduler

import (
	"time"

	"github.com/commitbox/commitbox/internal/db"
)

// action is what becomes of a row.
type action uint8

const (
	idle   action = iota // nothing before the wake time
	adopt                // give the row this process's timetable
	bury                 // the run's process is dead
	rewind               // the clock went back: plan the next tick anew
	skip                 // the tick is too late: give it up
	claim                // run the tick
)

// decision says what to do with a row, and for all that plan a tick, which comes next.
type decision struct {
	do   action
	wake time.Duration // for idle: how long nothing can happen
	plan plan
}

// plan is a tick with its jitter.
type plan struct{ tick, due time.Time }

// backMin is how far ahead of its timetable a row may be before that is taken for a database clock that went back. What is
// below is waited for: nothing runs twice because a clock was set right by some minutes.
const backMin = time.Hour

// decide is pure: the row says what time it is. first: this process has not yet said what its timetable is.
func (j *job) decide(row *db.ScheduleLookRow, first bool, cfg *Config) decision {
	now := row.Now
	if row.Spec != j.Spec || row.Zone != j.Zone {
		return j.decideForeign(row, first, cfg)
	}
	switch {
	case row.LeaseUntil != nil && !row.LeaseUntil.After(now):
		return decision{do: bury}
	case row.LeaseUntil != nil:
		return decision{wake: row.LeaseUntil.Sub(now)}
	case row.Paused:
		return decision{wake: cfg.Poll}
	case j.ahead(row.NextTickAt, now):
		return decision{do: rewind, plan: j.plan(now, cfg)}
	case row.DueAt.After(now):
		return decision{wake: row.DueAt.Sub(now)}
	}
	next := j.timetable.next(row.NextTickAt)
	if !next.After(now) {
		next = j.timetable.next(now)
	}
	d := decision{do: claim, plan: j.jittered(next, cfg)}
	if !j.catchesUp() && now.Sub(row.DueAt) > cfg.Late {
		d.do = skip
	}
	return d
}

// decideForeign is for a row with another timetable: the process that started last has its way, as a new release does.
// Others stand by, so that two timetables never take turns, and take over when nobody is left who follows the row's.
func (j *job) decideForeign(row *db.ScheduleLookRow, first bool, cfg *Config) decision {
	if wake := row.SeenAt.Add(cfg.standby()).Sub(row.Now); !first && wake > 0 {
		return decision{wake: wake}
	}
	if !row.NextTickAt.After(row.Now) {
		return decision{do: adopt, plan: plan{row.NextTickAt, row.DueAt}} // it is still to be run
	}
	after := row.Now
	if row.TickAt != nil && row.TickAt.After(after) && !j.ahead(*row.TickAt, row.Now) {
		after = *row.TickAt
	}
	return decision{do: adopt, plan: j.plan(after, cfg)}
}

// ahead says whether a tick is later than the timetable explains: more than one tick and more than backMin.
func (j *job) ahead(tick, now time.Time) bool {
	return tick.Sub(now) > backMin && tick.After(j.timetable.next(j.timetable.next(now)))
}

func (j *job) catchesUp() bool {
	_, interval := j.timetable.(every)
	return j.CatchUp || interval
}

// plan returns the first tick after a time.
func (j *job) plan(after time.Time, cfg *Config) plan {
	return j.jittered(j.timetable.next(after), cfg)
}

// jittered delays a tick by less than half the time to the one after it, so that ticks neither meet nor change places.
func (j *job) jittered(tick time.Time, cfg *Config) plan {
	tick = tick.Truncate(time.Microsecond) // what the database keeps
	room := min(j.Jitter, j.timetable.next(tick).Sub(tick)/2)
	return plan{tick, tick.Add(time.Duration(cfg.random() * float64(room)).Truncate(time.Microsecond))}
}
