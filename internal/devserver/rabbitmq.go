package devserver

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// RabbitMQOptions says how a RabbitMQ node is started.
type RabbitMQOptions struct {
	// Join makes the new node a member of this one's cluster. The members share
	// the first node's port mapper, so stop the first one last.
	Join *Server
	// Config are further lines of rabbitmq.conf.
	Config []string
}

// rabbitNode is what the members of a cluster share, and a node's own name.
type rabbitNode struct {
	name     string
	cookie   string
	distPort int
	epmdPort int
}

// StartRabbitMQ starts a RabbitMQ node with its own data and without plugins.
// The user is guest, with the password guest. A start takes some seconds.
//
// Erlang's port mapper (epmd) would by default be a daemon that all nodes of
// the machine share and that outlives them; a node started here has one of its
// own, which ends with it.
func StartRabbitMQ(ctx context.Context, o RabbitMQOptions) (*Server, error) {
	path, err := FindRabbitMQ()
	if err != nil {
		return nil, err
	}
	at, err := newPlace("rabbitmq", "rabbitmq")
	if err != nil {
		return nil, err
	}
	node, err := o.newNode(at.port)
	if err != nil {
		return nil, errors.Join(err, removeFolder(at.dir))
	}
	s := &Server{
		url:        fmt.Sprintf("amqp://guest:guest@%s/", loopback(at.port)),
		dir:        at.dir,
		node:       node,
		stopSignal: syscall.SIGTERM,
		ready:      func(ctx context.Context) error { return pingRabbitMQ(ctx, at.port) },
		command: command{
			path:   path,
			env:    node.environment(at),
			folder: at.dir,
			log:    filepath.Join(at.dir, "log"),
			as:     at.as,
		},
	}
	return open(ctx, s,
		func(context.Context) error { return o.writeFiles(at, node) },
		func(ctx context.Context) error { return o.startPortMapper(ctx, s, at) },
	)
}

// FindRabbitMQ returns the path of rabbitmq-server on this machine. The error is a
// [*MissingError] if there is none.
func FindRabbitMQ() (string, error) {
	// The wrapper script of the Debian package changes the user and the folder;
	// the script behind it does neither.
	return findBinary("rabbitmq-server", "/usr/lib/rabbitmq/bin/rabbitmq-server")
}

func (o RabbitMQOptions) newNode(port int) (rabbitNode, error) {
	n := rabbitNode{name: fmt.Sprintf("commitbox%d@localhost", port)}
	var err error
	if n.distPort, err = freePort(); err != nil {
		return n, err
	}
	if o.Join != nil {
		n.cookie, n.epmdPort = o.Join.node.cookie, o.Join.node.epmdPort
		return n, nil
	}
	n.cookie = fmt.Sprintf("commitbox%d", port)
	n.epmdPort, err = freePort()
	return n, err
}

func (n rabbitNode) environment(at place) []string {
	return append(n.epmdEnvironment(),
		"RABBITMQ_NODENAME="+n.name,
		"RABBITMQ_CONFIG_FILE="+filepath.Join(at.dir, "rabbitmq"),
		"RABBITMQ_ENABLED_PLUGINS_FILE="+filepath.Join(at.dir, "enabled_plugins"),
		"RABBITMQ_CONF_ENV_FILE="+filepath.Join(at.dir, "no-env-file"),
		"RABBITMQ_MNESIA_BASE="+filepath.Join(at.dir, "mnesia"),
		"RABBITMQ_LOG_BASE="+filepath.Join(at.dir, "logs"),
		"RABBITMQ_PID_FILE="+filepath.Join(at.dir, "rabbitmq.pid"),
		"RABBITMQ_DIST_PORT="+strconv.Itoa(n.distPort),
		`RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS=-start_epmd false -kernel inet_dist_use_interface {127,0,0,1}`,
		// The script then becomes the server instead of watching over it, so
		// the process that is started is the one that is signalled.
		"RUNNING_UNDER_SYSTEMD=true",
	)
}

func (n rabbitNode) epmdEnvironment() []string {
	return []string{"ERL_EPMD_ADDRESS=127.0.0.1", "ERL_EPMD_PORT=" + strconv.Itoa(n.epmdPort)}
}

func (o RabbitMQOptions) writeFiles(at place, node rabbitNode) error {
	config := append([]string{
		fmt.Sprintf("listeners.tcp.1 = %s", loopback(at.port)),
		"log.file = false",
		"log.console = true",
		"log.console.level = warning",
		"disk_free_limit.absolute = 50MB",
	}, o.Config...)
	if o.Join != nil {
		config = append(config,
			"cluster_formation.peer_discovery_backend = classic_config",
			"cluster_formation.classic_config.nodes.1 = "+o.Join.node.name,
			"cluster_formation.classic_config.nodes.2 = "+node.name,
		)
	}
	return errors.Join(
		at.as.writeFile(filepath.Join(at.dir, "rabbitmq.conf"), strings.Join(config, "\n")+"\n", 0o600),
		at.as.writeFile(filepath.Join(at.dir, "enabled_plugins"), "[].\n", 0o600),
		at.as.writeFile(filepath.Join(at.dir, ".erlang.cookie"), node.cookie, 0o400),
	)
}

// startPortMapper starts the epmd of a first node.
func (o RabbitMQOptions) startPortMapper(ctx context.Context, s *Server, at place) error {
	if o.Join != nil {
		return nil
	}
	path, err := findBinary("epmd")
	if err != nil {
		return err
	}
	p, err := launch(command{
		path:   path,
		env:    s.node.epmdEnvironment(),
		folder: at.dir,
		log:    filepath.Join(at.dir, "epmd.log"),
		as:     at.as,
	})
	if err != nil {
		return err
	}
	s.helpers = append(s.helpers, p)
	return p.waitReady(ctx, func(ctx context.Context) error {
		conn, err := dial(ctx, s.node.epmdPort)
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

// pingRabbitMQ opens an AMQP 0-9-1 connection as far as the server's first
// frame, Connection.Start. The listener is the last thing a node opens.
func pingRabbitMQ(ctx context.Context, port int) error {
	conn, err := dial(ctx, port)
	if err != nil {
		return err
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("AMQP\x00\x00\x09\x01")); err != nil {
		return err
	}
	return readStart(conn)
}

func readStart(conn net.Conn) error {
	var frame [11]byte // type, channel (2), size (4), class (2), method (2)
	if _, err := io.ReadFull(conn, frame[:]); err != nil {
		return err
	}
	if frame[0] != 1 || string(frame[7:]) != "\x00\x0a\x00\x0a" {
		return fmt.Errorf("rabbitmq answered %x instead of Connection.Start", frame)
	}
	return nil
}
