// Package cache keeps copies of what the inbox knows in Redis, through any go-redis v9 client: single, Sentinel or Cluster.
//
// In front of the table (modes double) it holds completed rows only, so that a duplicate costs one round trip to Redis and
// none to PostgreSQL. Redis may be slow, away, full, flushed or hostile: the table decides then, and nothing but speed is
// lost. An entry is believed only under its own key, with a signature by one of Config.Secrets, for the history of the
// database that the caller names.
//
// As the store of mode cache it holds tokens with a lease and what a message was finished with. What that does not promise:
// Redis is the only memory then. A failover that had not replicated a token or a finish, an eviction, a flush, a restart
// without persistence or a lease that ends while its holder stands still lets the same message run twice. Use it for work
// that may rarely happen twice; give Redis maxmemory-policy noeviction and a replica.
package cache
