package schema_test

import "strings"

// lexeme is a piece of SQL as PostgreSQL's scanner would cut it.
type lexeme struct {
	kind string // space, comment, text, dollar, quoted, word, number, parameter, other
	text string
}

// tokens cuts SQL into pieces that make up the whole text again. It is written apart from the rewriting, so that the two
// do not share a mistake.
func tokens(sql string) []lexeme {
	var list []lexeme
	for sql != "" {
		kind, n := nextToken(sql)
		list = append(list, lexeme{kind, sql[:n]})
		sql = sql[n:]
	}
	return list
}

func nextToken(sql string) (kind string, n int) {
	switch c := sql[0]; {
	case strings.IndexByte(" \t\r\n\f\v", c) >= 0:
		return "space", span(sql, func(b byte) bool { return strings.IndexByte(" \t\r\n\f\v", b) >= 0 })
	case strings.HasPrefix(sql, "--"):
		return "comment", span(sql, func(b byte) bool { return b != '\n' })
	case strings.HasPrefix(sql, "/*"):
		return "comment", blockComment(sql)
	case c == '\'':
		return "text", quoted(sql, '\'')
	case c == '"':
		return "quoted", quoted(sql, '"')
	case c == '$':
		return dollar(sql)
	case c >= '0' && c <= '9':
		return "number", span(sql, wordByte)
	case wordByte(c):
		return "word", span(sql, wordByte)
	}
	return "other", 1
}

func span(s string, in func(byte) bool) int {
	for i := range len(s) {
		if !in(s[i]) {
			return i
		}
	}
	return len(s)
}

func wordByte(b byte) bool {
	return b == '_' || b == '$' || b >= '0' && b <= '9' || b >= 'A' && b <= 'Z' || b >= 'a' && b <= 'z' || b >= 0x80
}

// quoted returns the length of a text in quotes, in which a doubled quote stands for one.
func quoted(s string, quote byte) int {
	for i := 1; i < len(s); i++ {
		if s[i] != quote {
			continue
		}
		if i+1 == len(s) || s[i+1] != quote {
			return i + 1
		}
		i++
	}
	return len(s)
}

func blockComment(s string) int {
	depth := 0
	for i := 0; i < len(s); {
		switch {
		case strings.HasPrefix(s[i:], "/*"):
			depth, i = depth+1, i+2
		case strings.HasPrefix(s[i:], "*/"):
			if depth, i = depth-1, i+2; depth == 0 {
				return i
			}
		default:
			i++
		}
	}
	return len(s)
}

// dollar reads a parameter such as $1 or a text such as $tag$…$tag$.
func dollar(s string) (kind string, n int) {
	if len(s) > 1 && s[1] >= '0' && s[1] <= '9' {
		return "parameter", span(s, wordByte)
	}
	tag := 1 + span(s[1:], func(b byte) bool { return b != '$' && wordByte(b) })
	if tag == len(s) || s[tag] != '$' {
		return "other", span(s, wordByte)
	}
	tag++
	if end := strings.Index(s[tag:], s[:tag]); end >= 0 {
		return "dollar", tag + end + tag
	}
	return "dollar", len(s)
}
