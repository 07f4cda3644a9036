package commitbox

import "slices"

// What the library measures.
var (
	OutboxPublished = &Metric{
		"commitbox_outbox_published", Counter, "1",
		"Messages handed to the publisher, by result: ok, permanent, retryable, unavailable, not_tried.",
		[]string{"channel", "result"},
	}
	OutboxDead = &Metric{
		"commitbox_outbox_dead", Counter, "1",
		"Messages that were given up and wait for an operator.",
		[]string{"channel"},
	}
	OutboxPublishSeconds = &Metric{
		"commitbox_outbox_publish_seconds", Histogram, "s",
		"Time of one Publish call.",
		[]string{"channel"},
	}
	OutboxLagSeconds = &Metric{
		"commitbox_outbox_lag_seconds", Histogram, "s",
		"Age of a message when its confirmation arrived, from the database's and this process's clocks.",
		[]string{"channel"},
	}
	OutboxOwnedShards = &Metric{
		"commitbox_outbox_owned_shards", Gauge, "1",
		"Shards that this relay owns.",
		[]string{"channel"},
	}
	OutboxLeakedWriters = &Metric{
		"commitbox_outbox_leaked_writers", Gauge, "1",
		"Open transactions that have enqueued and are older than MaxWriterAge.",
		[]string{"channel"},
	}
	OutboxBreakerOpen = &Metric{
		"commitbox_outbox_breaker_open", Gauge, "1",
		"1 while this relay waits for its destination to come back.",
		[]string{"channel"},
	}
	OutboxErrors = &Metric{
		"commitbox_outbox_errors", Counter, "1",
		"Errors of the relay itself, by kind: database, lease_lost, stalled, panic.",
		[]string{"channel", "kind"},
	}

	InboxHandled = &Metric{
		"commitbox_inbox_handled", Counter, "1",
		"Messages seen, by outcome and by who decided.",
		[]string{"consumer", "outcome", "decided_by"},
	}
	InboxSeconds = &Metric{
		"commitbox_inbox_seconds", Histogram, "s",
		"Time from the claim to the answer, by outcome.",
		[]string{"consumer", "outcome"},
	}
	InboxRetries = &Metric{
		"commitbox_inbox_retries", Counter, "1",
		"Transactions run again after a serialization failure or a deadlock.",
		[]string{"consumer"},
	}
	InboxUnguarded = &Metric{
		"commitbox_inbox_unguarded", Counter, "1",
		"Messages handled with less than their mode asks for, by why: off, store_down (a store did not answer and the policy is open), token_lost; and forgotten, once for each history that an operator ended.",
		[]string{"consumer", "why"},
	}
	InboxPolicyVersion = &Metric{
		"commitbox_inbox_policy_version", Gauge, "1",
		"The version of the policies that this process follows.",
		nil,
	}
	InboxPolicyErrors = &Metric{
		"commitbox_inbox_policy_errors", Counter, "1",
		"Policies that could not be followed, by kind: database, invalid, restored.",
		[]string{"kind"},
	}

	CacheLookups = &Metric{
		"commitbox_cache_lookups", Counter, "1",
		"Look-ups in Redis that were answered, by what was found: hit, miss, stale, forged, unreadable, oversized.",
		[]string{"consumer", "result"},
	}
	CacheErrors = &Metric{
		"commitbox_cache_errors", Counter, "1",
		"Calls to Redis that failed, by kind: timeout, connection, not_ready, write_refused, refused, open (not asked), too_large (not sent).",
		[]string{"operation", "kind"},
	}
	CacheSeconds = &Metric{
		"commitbox_cache_seconds", Histogram, "s",
		"Time of one call to Redis, failed ones included. Operations: get, put; acquire, renew, finish, release, look; lock, relock, unlock; info.",
		[]string{"operation"},
	}
	CacheBreakerOpen = &Metric{
		"commitbox_cache_breaker_open", Gauge, "1",
		"1 while Redis is left alone because it did not answer, by store: cache, lock.",
		[]string{"store"},
	}
	InboxExpiredLeases = &Metric{
		"commitbox_inbox_expired_leases", Gauge, "1",
		"Leases that have expired without anybody taking over, as the last clean-up saw them; counted up to 10 000.",
		[]string{"consumer"},
	}

	CleanupRows = &Metric{
		"commitbox_cleanup_rows", Counter, "1",
		"Rows that clean-up removed (completed, dead, discarded, gone) or made dead (abandoned).",
		[]string{"consumer", "kind"},
	}
	CleanupRuns = &Metric{
		"commitbox_cleanup_runs", Counter, "1",
		"Runs of clean-up, by result: done, budget, skipped, refused (because of a clock), error.",
		[]string{"result"},
	}
	CleanupSeconds = &Metric{
		"commitbox_cleanup_seconds", Histogram, "s",
		"Time of one run of clean-up.",
		nil,
	}

	TableBytes = &Metric{
		"commitbox_table_bytes", Gauge, "By",
		"Size on disk of each table of the library, indexes included, as the last clean-up saw it.",
		[]string{"table"},
	}

	ConsumerMessages = &Metric{
		"commitbox_consumer_messages", Counter, "1",
		"Deliveries settled at the broker, by consumer and settlement: ack, retry, dead_letter, missing_id, error.",
		[]string{"consumer", "settlement"},
	}

	SchedulerRuns = &Metric{
		"commitbox_scheduler_runs", Counter, "1",
		"Runs of a job, by outcome: succeeded, failed, panicked, timed_out, hung, died, cancelled.",
		[]string{"job", "outcome"},
	}
	SchedulerSeconds = &Metric{
		"commitbox_scheduler_run_seconds", Histogram, "s",
		"Time of one run.",
		[]string{"job"},
	}
	SchedulerLateSeconds = &Metric{
		"commitbox_scheduler_late_seconds", Histogram, "s",
		"How long after it was due a tick was claimed, by the database's clock.",
		[]string{"job"},
	}
	SchedulerMissed = &Metric{
		"commitbox_scheduler_missed", Counter, "1",
		"Times that ticks of a job were given up because no process was there; a pause of any length counts once.",
		[]string{"job"},
	}
	SchedulerErrors = &Metric{
		"commitbox_scheduler_errors", Counter, "1",
		"Errors of the scheduler itself, by kind: database, lease_lost, hung.",
		[]string{"kind"},
	}
)

var metrics = []*Metric{
	OutboxPublished, OutboxDead, OutboxPublishSeconds, OutboxLagSeconds, OutboxOwnedShards, OutboxLeakedWriters, OutboxBreakerOpen, OutboxErrors,
	InboxHandled, InboxSeconds, InboxRetries, InboxExpiredLeases,
	InboxUnguarded, InboxPolicyVersion, InboxPolicyErrors, CacheLookups, CacheErrors, CacheSeconds, CacheBreakerOpen, ConsumerMessages,
	SchedulerRuns, SchedulerSeconds, SchedulerLateSeconds, SchedulerMissed, SchedulerErrors,
	CleanupRows, CleanupRuns, CleanupSeconds, TableBytes,
}

// Metrics returns everything that the library measures, so that an adapter can make its instruments up front.
func Metrics() []*Metric { return slices.Clone(metrics) }
