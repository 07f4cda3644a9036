package inbox_test

import (
	"bufio"
	"io"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// liar stands in front of a Redis and answers commands by an error, as a server does that cannot serve them now: two of
// three, so that what it lets through is asked and kept in between.
type liar struct {
	url    string
	target string

	mu       sync.Mutex
	error    string
	commands []string // empty: all
	heard    int
	conns    []net.Conn
}

func newLiar(t *testing.T, target string) *liar {
	t.Helper()
	u, err := url.Parse(target)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &liar{target: u.Host}
	u.Host = listener.Addr().String()
	l.url = u.String()
	var running sync.WaitGroup
	running.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			running.Go(func() { l.serve(client) })
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		l.mu.Lock()
		for _, c := range l.conns {
			_ = c.Close()
		}
		l.mu.Unlock()
		running.Wait()
	})
	return l
}

// says gives these commands an error for an answer from now on, or all that a client sends after its greeting.
func (l *liar) says(text string, commands ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.error, l.commands = text, commands
}

func (l *liar) answer(command string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.error == "" || command == "hello" || command == "client" || len(l.commands) > 0 && !slices.Contains(l.commands, command) {
		return ""
	}
	if l.heard++; l.heard%3 == 0 {
		return ""
	}
	return "-" + l.error + "\r\n"
}

func (l *liar) serve(client net.Conn) {
	server, err := net.Dial("tcp", l.target)
	if err != nil {
		_ = client.Close()
		return
	}
	l.mu.Lock()
	l.conns = append(l.conns, client, server)
	l.mu.Unlock()
	defer func() {
		_ = client.Close()
		_ = server.Close()
	}()
	in, out := bufio.NewReader(client), bufio.NewReader(server)
	for {
		command, err := readValue(in)
		if err != nil {
			return
		}
		words := strings.SplitN(string(command), "\r\n", 4)
		answer := []byte(l.answer(strings.ToLower(words[min(2, len(words)-1)])))
		if len(answer) == 0 {
			if _, err := server.Write(command); err != nil {
				return
			}
			if answer, err = readValue(out); err != nil {
				return
			}
		}
		if _, err := client.Write(answer); err != nil {
			return
		}
	}
}

// readValue reads a command or an answer as it is on the wire.
func readValue(r *bufio.Reader) ([]byte, error) {
	value, err := r.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	parts, _ := strconv.Atoi(strings.TrimSpace(string(value[1:])))
	switch value[0] {
	case '$', '=', '!':
		if parts < 0 {
			return value, nil
		}
		body := make([]byte, parts+2)
		_, err := io.ReadFull(r, body)
		return append(value, body...), err
	case '%':
		parts *= 2
	case '*', '~', '>':
	default:
		return value, nil
	}
	for range parts {
		part, err := readValue(r)
		if err != nil {
			return nil, err
		}
		value = append(value, part...)
	}
	return value, nil
}
