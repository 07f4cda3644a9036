package scheduler

import (
	"strings"
	"time"

	"github.com/robfig/cron/v3"

	"github.com/commitbox/commitbox"
)

// timetable says when ticks are. It is a pure function of the times that it is given, which are the database's.
type timetable interface {
	// next returns the first tick after t; zero if there is none within five years.
	next(t time.Time) time.Time
}

// everyMin keeps an interval above what looking for ticks costs.
const everyMin = 100 * time.Millisecond

// everyHour has the bits of all 24 hours.
const everyHour = 1<<24 - 1

var cronParser = cron.NewParser(cron.SecondOptional | cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)

func parse(spec, zone string) (timetable, *time.Location, error) {
	loc, err := time.LoadLocation(zone)
	if err != nil || zone == "Local" {
		return nil, nil, &commitbox.InputError{Field: "Zone", Problem: "is not the name of a known time zone"}
	}
	table, err := parseSpec(spec, loc)
	return table, loc, err
}

// parseSpec makes a timetable. Intervals are parsed here: the parser cuts them to whole seconds.
func parseSpec(spec string, loc *time.Location) (timetable, error) {
	if text, ok := strings.CutPrefix(spec, "@every "); ok {
		interval, err := time.ParseDuration(strings.TrimSpace(text))
		if err != nil {
			return nil, &commitbox.InputError{Field: "Spec", Problem: "is not an interval such as @every 90s"}
		}
		if interval < everyMin {
			return nil, &commitbox.InputError{Field: "Spec", Problem: "is an interval below 100ms"}
		}
		return every(interval), nil
	}
	if strings.Contains(spec, "TZ=") { // the parser panics on some of these
		return nil, &commitbox.InputError{Field: "Spec", Problem: "names a time zone; use Zone"}
	}
	schedule, err := cronParser.Parse(spec)
	if err != nil {
		return nil, &commitbox.InputError{Field: "Spec", Problem: "is not a cron line: " + err.Error()}
	}
	line, ok := schedule.(*cron.SpecSchedule)
	if !ok {
		return nil, &commitbox.InputError{Field: "Spec", Problem: "is not a cron line"}
	}
	line.Location = time.UTC
	var table timetable = wallClock{line, loc}
	if line.Hour&everyHour == everyHour {
		table = realTime{line, loc}
	}
	if table.next(time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)).IsZero() {
		return nil, &commitbox.InputError{Field: "Spec", Problem: "never comes true"}
	}
	return table, nil
}

// every is a timetable without a grid: a tick is due when the last one is older than the interval.
type every time.Duration

func (e every) next(t time.Time) time.Time { return t.Add(time.Duration(e)) }

// realTime is for lines that match every hour: each hour that passes has its ticks, also the repeated one, and there are
// none in an hour that is left out.
//
// It goes from one change of the clock to the next, because the parser's own Next leaves out a whole day whose midnight does not
// exist, if only some days match.
type realTime struct {
	line *cron.SpecSchedule // in UTC
	zone *time.Location
}

func (r realTime) next(t time.Time) time.Time {
	for since := t; ; {
		local := since.In(r.zone)
		_, seconds := local.Zone()
		_, change := local.ZoneBounds()
		offset := time.Duration(seconds) * time.Second
		face := r.line.Next(t.UTC().Add(offset))
		if face.IsZero() {
			return face
		}
		if at := face.Add(-offset); change.IsZero() || at.Before(change) {
			return at
		}
		since, t = change, change.Add(-time.Nanosecond)
	}
}

// wallClock is for lines with fixed hours. The line is followed on a clock that is never changed, and what it shows is
// then looked up in the zone. That order never goes back, so nothing is left out and nothing comes twice. The parser's own
// Next leaves out what falls into the gap of spring and repeats the hour of autumn.
type wallClock struct {
	line *cron.SpecSchedule // in UTC
	zone *time.Location
}

func (w wallClock) next(t time.Time) time.Time {
	for face := shown(t.In(w.zone)); ; {
		if face = w.line.Next(face); face.IsZero() {
			return face
		}
		if at := firstTime(face, w.zone); at.After(t) {
			return at
		}
	}
}

// shown is what a clock on the wall shows at t, as a time in UTC.
func shown(t time.Time) time.Time {
	_, offset := t.Zone()
	return t.Add(time.Duration(offset) * time.Second).UTC()
}

// firstTime returns when the clock first shows face; if it never does, the end of the gap that face falls into.
func firstTime(face time.Time, zone *time.Location) time.Time {
	t := time.Date(face.Year(), face.Month(), face.Day(), face.Hour(), face.Minute(), face.Second(), face.Nanosecond(), zone)
	start, end := t.ZoneBounds()
	switch show := shown(t); {
	case show.After(face):
		return start
	case show.Before(face):
		return end
	}
	if start.IsZero() {
		return t
	}
	_, offset := t.Zone()
	_, before := start.Add(-1).Zone()
	if earlier := t.Add(time.Duration(offset-before) * time.Second); earlier.Before(start) {
		return earlier
	}
	return t
}
