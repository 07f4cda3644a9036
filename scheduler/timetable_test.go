package scheduler

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/commitbox/commitbox"
)

const stamp = "2006-01-02 15:04:05 -0700"

// ticksOf lists the ticks after from and up to to, as the zone's clock shows them.
func ticksOf(t *testing.T, spec, zone, from, to string) []string {
	t.Helper()
	table, loc, err := parse(spec, zone)
	if err != nil {
		t.Fatal(err)
	}
	at, err := time.ParseInLocation("2006-01-02 15:04", from, loc)
	if err != nil {
		t.Fatal(err)
	}
	end, err := time.ParseInLocation("2006-01-02 15:04", to, loc)
	if err != nil {
		t.Fatal(err)
	}
	var list []string
	for at = table.next(at.UTC()); !at.After(end); at = table.next(at.UTC()) {
		list = append(list, at.In(loc).Format("02 15:04 -0700"))
		if len(list) > 100 {
			t.Fatal("does not come to an end")
		}
	}
	return list
}

// Around the days on which clocks change, each wall-clock time has one tick.
func TestB71_ChangeDays(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ spec, zone, from, to, want string }{
		// Los Angeles: 02:00 to 03:00 is left out on 9 March, 01:00 to 02:00 comes twice on 2 November 2025.
		{"0 2 * * *", "America/Los_Angeles", "2025-03-08 00:00", "2025-03-10 12:00", "08 02:00 -0800, 09 03:00 -0700, 10 02:00 -0700"},
		{"30 2 * * *", "America/Los_Angeles", "2025-03-08 00:00", "2025-03-10 12:00", "08 02:30 -0800, 09 03:00 -0700, 10 02:30 -0700"},
		{"*/20 2-3 * * *", "America/Los_Angeles", "2025-03-09 00:00", "2025-03-09 12:00", "09 03:00 -0700, 09 03:20 -0700, 09 03:40 -0700"},
		{"30 1 * * *", "America/Los_Angeles", "2025-11-01 00:00", "2025-11-03 12:00", "01 01:30 -0700, 02 01:30 -0700, 03 01:30 -0800"},
		{"0 1,2 * * *", "America/Los_Angeles", "2025-11-02 00:00", "2025-11-02 12:00", "02 01:00 -0700, 02 02:00 -0800"},
		{"30 * * * *", "America/Los_Angeles", "2025-11-02 00:00", "2025-11-02 03:00", "02 00:30 -0700, 02 01:30 -0700, 02 01:30 -0800, 02 02:30 -0800"},
		{"30 * * * *", "America/Los_Angeles", "2025-03-09 00:00", "2025-03-09 04:00", "09 00:30 -0800, 09 01:30 -0800, 09 03:30 -0700"},
		// Berlin: 30 March and 26 October 2025.
		{"15 2 * * *", "Europe/Berlin", "2025-03-29 00:00", "2025-03-31 12:00", "29 02:15 +0100, 30 03:00 +0200, 31 02:15 +0200"},
		{"15 2 * * *", "Europe/Berlin", "2025-10-25 00:00", "2025-10-27 12:00", "25 02:15 +0200, 26 02:15 +0200, 27 02:15 +0100"},
		{"0 3 * * *", "Europe/Berlin", "2025-03-29 12:00", "2025-03-31 12:00", "30 03:00 +0200, 31 03:00 +0200"},
		{"0 3 * * *", "Europe/Berlin", "2025-10-25 12:00", "2025-10-27 12:00", "26 03:00 +0100, 27 03:00 +0100"},
		// Midnight does not exist in Sao Paulo on 4 November 2018, and comes twice in Havana on 2 November 2025.
		{"@daily", "America/Sao_Paulo", "2018-11-02 12:00", "2018-11-05 12:00", "03 00:00 -0300, 04 01:00 -0200, 05 00:00 -0200"},
		{"0 5 3 11 *", "America/Sao_Paulo", "2018-11-01 00:00", "2018-11-30 12:00", "03 05:00 -0300"},
		{"30 0 * * *", "America/Havana", "2025-11-01 12:00", "2025-11-03 12:00", "02 00:30 -0400, 03 00:30 -0500"},
		// Lord Howe moves by half an hour.
		{"10 2 * * *", "Australia/Lord_Howe", "2025-10-04 12:00", "2025-10-06 12:00", "05 02:30 +1100, 06 02:10 +1100"},
		{"45 1 * * *", "Australia/Lord_Howe", "2025-04-05 12:00", "2025-04-07 12:00", "06 01:45 +1100, 07 01:45 +1030"},
		// A whole day is left out in Apia.
		{"0 12 * * *", "Pacific/Apia", "2011-12-28 13:00", "2011-12-31 13:00", "29 12:00 -1000, 31 00:00 +1400, 31 12:00 +1400"},
		// A day without a midnight is not left out: Cairo on Friday, 25 April 2025.
		{"0 * * * 5", "Africa/Cairo", "2025-04-24 20:00", "2025-04-25 03:30", "25 01:00 +0300, 25 02:00 +0300, 25 03:00 +0300"},
		{"30 */1 25 4 *", "Africa/Cairo", "2025-04-24 20:00", "2025-04-25 02:30", "25 01:30 +0300, 25 02:30 +0300"},
		{"0 2 * * *", "UTC", "2025-03-08 12:00", "2025-03-10 12:00", "09 02:00 +0000, 10 02:00 +0000"},
	} {
		if got := strings.Join(ticksOf(t, c.spec, c.zone, c.from, c.to), ", "); got != c.want {
			t.Errorf("%s in %s after %s:\ngot  %s\nwant %s", c.spec, c.zone, c.from, got, c.want)
		}
	}
}

// A daily line has one tick a day through three years of changes, wherever one asks from.
func TestB71_OneTickADay(t *testing.T) {
	t.Parallel()
	for _, zone := range []string{"UTC", "America/New_York", "Europe/London", "Africa/Casablanca", "Australia/Lord_Howe", "America/Havana", "Asia/Kathmandu"} {
		for _, spec := range []string{"0 0 * * *", "30 0 * * *", "0 1 * * *", "59 1 * * *", "0 2 * * *", "30 2 * * *", "1 3 * * *"} {
			table, _, err := parse(spec, zone)
			if err != nil {
				t.Fatal(err)
			}
			at := table.next(time.Date(2024, 1, 1, 12, 0, 0, 0, time.UTC))
			first, n := at, 1
			for ; n <= 400; n++ {
				next := table.next(at)
				if gap := next.Sub(at); gap < 21*time.Hour || gap > 27*time.Hour {
					t.Errorf("%s in %s: %v after %v", spec, zone, next, at)
				}
				if half := table.next(at.Add(next.Sub(at) / 2)); !half.Equal(next) {
					t.Errorf("%s in %s: %v, but %v when asked later", spec, zone, next, half)
				}
				at = next
			}
			if days := int(at.Sub(first).Round(24*time.Hour) / (24 * time.Hour)); days != 400 {
				t.Errorf("%s in %s: 400 ticks in %d days", spec, zone, days)
			}
		}
	}
}

// Without a zone a line is read in UTC, which no change of clocks reaches, and so does the job that cleans up.
func TestB71_TheDefaultIsUTC(t *testing.T) {
	t.Parallel()
	cleanup := (&Cleanup{}).Job()
	for _, c := range []struct {
		job  Job
		step time.Duration
	}{{Job{Spec: "0 2 * * *"}, 24 * time.Hour}, {Job{Spec: "30 1 * * *"}, 24 * time.Hour}, {Job{Spec: cleanup.Spec, Zone: cleanup.Zone}, time.Hour}} {
		j := jobOf(t, c.job)
		if j.Zone != "UTC" || j.zone != time.UTC {
			t.Errorf("%s is read in %s", j.Spec, j.Zone)
		}
		for _, day := range []time.Time{time.Date(2025, 3, 8, 0, 0, 0, 0, time.UTC), time.Date(2025, 10, 25, 0, 0, 0, 0, time.UTC), time.Date(2025, 11, 1, 0, 0, 0, 0, time.UTC)} {
			at := j.timetable.next(day)
			for range int(3 * 24 * time.Hour / c.step) {
				next := j.timetable.next(at)
				if next.Sub(at) != c.step {
					t.Errorf("%s: %v after %v", j.Spec, next, at)
				}
				at = next
			}
		}
	}
}

// The parser's own Next does what the wrapper is there for.
func TestB71_TheParserAloneSkipsAndDoubles(t *testing.T) {
	t.Parallel()
	for spec, want := range map[string][2]string{
		"0 2 * * *":  {"2025-03-08 02:00:00 -0800", "2025-03-10 02:00:00 -0700"},
		"30 1 * * *": {"2025-11-02 01:30:00 -0700", "2025-11-02 01:30:00 -0800"},
	} {
		schedule, err := cronParser.Parse("CRON_TZ=America/Los_Angeles " + spec)
		if err != nil {
			t.Fatal(err)
		}
		at, err := time.Parse(stamp, want[0])
		if err != nil {
			t.Fatal(err)
		}
		pacific, err := time.LoadLocation("America/Los_Angeles")
		if err != nil {
			t.Fatal(err)
		}
		if got := schedule.Next(at).In(pacific).Format(stamp); got != want[1] {
			t.Errorf("%s after %s: %s; if the parser has learned, the wrapper can go", spec, want[0], got)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	t.Parallel()
	for _, c := range [][2]string{
		{"", "UTC"},
		{"* * * *", "UTC"},
		{"* * * * * * *", "UTC"},
		{"61 * * * *", "UTC"},
		{"@reboot", "UTC"},
		{"@every", "UTC"},
		{"@every x", "UTC"},
		{"@every 99ms", "UTC"},
		{"@every -1h", "UTC"},
		{"0 0 31 2 *", "UTC"},
		{"TZ=UTC", "UTC"},
		{"CRON_TZ=UTC", "UTC"},
		{"CRON_TZ=UTC * * * * *", "UTC"},
		{"* * * * *", "Mars/Olympus"},
		{"* * * * *", "Local"},
	} {
		_, _, err := parse(c[0], c[1])
		if input := new(commitbox.InputError); !errors.As(err, &input) {
			t.Errorf("%q in %s: %v", c[0], c[1], err)
		}
	}
	for _, spec := range []string{"* * * * *", "*/5 * * * * *", "@hourly", "@daily", "@weekly", "@monthly", "@yearly", "@every 100ms", "0 0 29 2 *", "0 0 1 1 MON"} {
		if _, _, err := parse(spec, "UTC"); err != nil {
			t.Errorf("%q: %v", spec, err)
		}
	}
}
