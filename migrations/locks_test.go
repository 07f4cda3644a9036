package migrations_test

import (
	"regexp"
	"strings"
)

var (
	makes      = regexp.MustCompile(`^create (?:table|sequence|view|schema)(?: if not exists)? (\S+)`)
	functions  = regexp.MustCompile(`^(?:create(?: or replace)?|drop) function `)
	harmless   = regexp.MustCompile(`^(?:comment on|grant|revoke) `)
	indexes    = regexp.MustCompile(`^create(?: unique)? index( concurrently)?.*? on (\S+)`)
	fillings   = regexp.MustCompile(`^(?:insert into|create trigger .*? on) (\S+) `)
	alters     = regexp.MustCompile(`^alter table (?:only )?(\S+) (.*)$`)
	quick      = regexp.MustCompile(`^(?:add column |add constraint .* not valid$|validate constraint |drop constraint |alter column \S+ (?:set|drop) default|set \()`)
	rewriting  = regexp.MustCompile(`generated| references | unique| primary key|default [^(]*\(| check `)
	spaces     = regexp.MustCompile(`\s+`)
	commentRow = regexp.MustCompile(`(?m)--.*$`)
)

// longLocks names the statements of a migration that hold a lock on a table of an earlier one for as long as it is
// large: they rewrite it, read all of it, or take away what the running release needs.
func longLocks(up string) (problems []string) {
	made := map[string]bool{}
	for _, s := range statements(up) {
		if name := makes.FindStringSubmatch(s); name != nil {
			made[strings.TrimSuffix(name[1], "(")] = true
			continue
		}
		if !short(s, made, strings.Contains(up, "-- +goose NO TRANSACTION")) {
			problems = append(problems, s)
		}
	}
	return problems
}

func short(s string, made map[string]bool, noTransaction bool) bool {
	if functions.MatchString(s) || harmless.MatchString(s) {
		return true
	}
	if index := indexes.FindStringSubmatch(s); index != nil {
		return made[index[2]] || index[1] != "" && noTransaction
	}
	if filling := fillings.FindStringSubmatch(s); filling != nil {
		return made[filling[1]]
	}
	if alter := alters.FindStringSubmatch(s); alter != nil {
		fills := strings.HasPrefix(alter[2], "add column ") && rewriting.MatchString(alter[2])
		return made[alter[1]] || quick.MatchString(alter[2]) && !fills
	}
	return false
}

// statements cuts a file at semicolons outside dollar quotes, and makes each statement one line without comments.
func statements(sql string) (list []string) {
	for i, part := range strings.Split(commentRow.ReplaceAllString(sql, ""), "$$") {
		if i%2 == 1 { // the body of a function
			list[len(list)-1] += "$$"
			continue
		}
		for j, piece := range strings.Split(part, ";") {
			if j == 0 && len(list) > 0 {
				list[len(list)-1] += piece
			} else {
				list = append(list, piece)
			}
		}
	}
	kept := list[:0]
	for _, s := range list {
		if s = strings.ToLower(strings.TrimSpace(spaces.ReplaceAllString(s, " "))); s != "" {
			kept = append(kept, s)
		}
	}
	return kept
}
