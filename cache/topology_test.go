package cache_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/commitbox/commitbox"
	"github.com/commitbox/commitbox/cache"
	"github.com/commitbox/commitbox/inbox"
	"github.com/commitbox/commitbox/internal/testenv"
)

func hostPort(t testing.TB, address string) string {
	t.Helper()
	u, err := url.Parse(address)
	must(t, err)
	return u.Host
}

// node starts a server of a cluster that has no slots yet.
func node(t testing.TB) (client *redis.Client, address, bus string) {
	t.Helper()
	bus = busPort(t)
	s := private(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", bus)
	return connect(t, s.URL()), hostPort(t, s.URL()), bus
}

// busPort returns a free port on which the nodes of a cluster talk to each other. The one that they take by themselves, 10000
// above their own, may be that of somebody's outgoing connection.
func busPort(t testing.TB) string {
	t.Helper()
	for range 100 {
		port := strconv.Itoa(10000 + rand.IntN(5000))
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			must(t, l.Close())
			return port
		}
	}
	t.Fatal("no port is free")
	return ""
}

// cluster starts three masters and returns their clients and addresses.
func cluster(t testing.TB) (nodes []*redis.Client, addresses []string) {
	t.Helper()
	for i := range 3 {
		client, address, bus := node(t)
		nodes, addresses = append(nodes, client), append(addresses, address)
		must(t, client.ClusterAddSlotsRange(t.Context(), i*5462, min(i*5462+5461, 16383)).Err())
		must(t, client.Do(t.Context(), "CLUSTER", "SET-CONFIG-EPOCH", i+1).Err())
		if i > 0 {
			host, port, _ := strings.Cut(address, ":")
			must(t, nodes[0].Do(t.Context(), "CLUSTER", "MEET", host, port, bus).Err())
		}
	}
	for _, client := range nodes {
		eventually(t, func() error {
			info, err := client.ClusterInfo(t.Context()).Result()
			if err != nil || !strings.Contains(info, "cluster_state:ok") || !strings.Contains(info, "cluster_known_nodes:3") {
				return fmt.Errorf("not ready: %w\n%s", err, info)
			}
			return nil
		})
	}
	return nodes, addresses
}

// works demands that copies, marks and locks work for ids of many slots.
func works(t testing.TB, client redis.UniversalClient) {
	t.Helper()
	c := open(t, client)
	l := newLocker(t, client, cache.LockConfig{Timeout: 2 * time.Second})
	for range 20 {
		id := newID()
		wantMiss(t, c, here, id)
		must(t, c.Put(t.Context(), here, id, completed("x"), time.Minute))
		wantHit(t, c, id, completed("x"))
		take(t, c, id, "a", inbox.GuardGranted)
		says(t, true)(c.Renew(t.Context(), id, "a", time.Minute))
		says(t, true)(c.Finish(t.Context(), id, "a", completed("x"), time.Minute))
		take(t, c, id, "b", inbox.GuardDone)
		must(t, acquire(t, l, id.Message).Release())
	}
}

// TestCluster uses three masters through a client of the cluster, and one of them through a client that knows no cluster:
// it hears MOVED, which means that Redis cannot be asked.
func TestCluster(t *testing.T) {
	t.Parallel()
	nodes, addresses := cluster(t)
	client := redis.NewUniversalClient(&redis.UniversalOptions{Addrs: addresses, ContextTimeoutEnabled: true})
	t.Cleanup(func() { must(t, client.Close()) })
	if _, ok := client.(*redis.ClusterClient); !ok {
		t.Fatalf("the client is a %T", client)
	}
	works(t, client)

	o := newCounts()
	lost := open(t, nodes[0], observed(o))
	moved := 0
	for range 50 {
		if _, _, err := lost.Get(t.Context(), here, newID()); err != nil {
			wantUnavailable(t, err)
			moved++
		}
	}
	if moved == 0 || o.of(commitbox.CacheErrors, "get", "not_ready") == 0 {
		t.Errorf("no key was of another node: %v", o.total)
	}
}

// TestB5_AClusterThatIsDownIsAway asks a node of a cluster whose slots nobody serves.
func TestB5_AClusterThatIsDownIsAway(t *testing.T) {
	t.Parallel()
	client, _, _ := node(t)
	o := newCounts()
	c := open(t, client, observed(o), func(c *cache.Config) { c.FailuresMax, c.OpenFor = 3, 100*time.Millisecond })
	for range 10 {
		_, _, err := c.Get(t.Context(), here, newID())
		wantUnavailable(t, err)
	}
	if o.of(commitbox.CacheErrors, "get", "not_ready") < 3 || o.of(commitbox.CacheErrors, "get", "open") == 0 {
		t.Errorf("counted %v", o.total)
	}
	must(t, client.ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	back(t, c)
}

// TestB44_SentinelFailover kills a master under a client of Sentinel: the new master is used, whatever it knows.
func TestB44_SentinelFailover(t *testing.T) {
	t.Parallel()
	master := private(t)
	host, port, _ := strings.Cut(hostPort(t, master.URL()), ":")
	replica := private(t, "--replicaof", host, port)
	eventually(t, func() error {
		if info := connect(t, replica.URL()).Info(t.Context(), "replication").Val(); !strings.Contains(info, "master_link_status:up") {
			return errors.New("the replica is not in step")
		}
		return nil
	})
	sentinel := testenv.PrivateSentinel(t, "main", master.URL())
	client := redis.NewUniversalClient(&redis.UniversalOptions{
		Addrs: []string{hostPort(t, sentinel.URL())}, MasterName: "main", ContextTimeoutEnabled: true,
	})
	t.Cleanup(func() { must(t, client.Close()) })
	works(t, client)
	watch := connect(t, sentinel.URL())
	eventually(t, func() error {
		if n, err := watch.Do(t.Context(), "SENTINEL", "REPLICAS", "main").Slice(); err != nil || len(n) != 1 {
			return fmt.Errorf("sentinel knows %d replicas, %w", len(n), err)
		}
		return nil
	})
	c := open(t, client, func(c *cache.Config) { c.Timeout, c.OpenFor = 500*time.Millisecond, 100*time.Millisecond })
	id := newID()
	take(t, c, id, "a", inbox.GuardGranted)
	must(t, master.Kill())
	_, _, err := c.Get(context.Background(), here, newID())
	wantUnavailable(t, err)
	back(t, c)
	works(t, client)
	state, _, _, err := c.Begin(t.Context(), id, "b", time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("after the failover the state of a message in progress is %d; nothing promises that it is %d", state, inbox.GuardHeld)
}
