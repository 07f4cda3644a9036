package devserver

import (
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
)

// Ports are drawn below the range that systems use for outgoing connections:
// a port that a killed server leaves cannot be taken by a client's socket
// before the server is restarted on it.
const (
	portFirst = 15000
	portLast  = 31999
)

var drawn = struct {
	sync.Mutex
	ports map[int]bool
}{ports: make(map[int]bool)}

// freePort returns a loopback port that nobody listens on and that this process
// has not been given before.
func freePort() (int, error) {
	drawn.Lock()
	defer drawn.Unlock()
	for range 1000 {
		port := portFirst + rand.IntN(portLast-portFirst+1)
		if drawn.ports[port] {
			continue
		}
		l, err := net.Listen("tcp", loopback(port))
		if err != nil {
			continue
		}
		drawn.ports[port] = true
		return port, l.Close()
	}
	return 0, fmt.Errorf("devserver: no free port between %d and %d on 127.0.0.1", portFirst, portLast)
}

func loopback(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }
