-- name: OutboxStats :one
-- The state of a channel. Plain reads of a bounded number of index entries, see the function.
select s.pending::bigint as pending, s.pending_exact::boolean as pending_exact, s.oldest_seconds::float8 as oldest_seconds,
       s.deferred::bigint as deferred, s.blocked_keys::bigint as blocked_keys, s.deferred_exact::boolean as deferred_exact,
       s.dead::bigint as dead, s.discarded::bigint as discarded, s.dead_exact::boolean as dead_exact,
       s.scheduled::bigint as scheduled, s.scheduled_exact::boolean as scheduled_exact, s.relays::bigint as relays
from commitbox.outbox_stats(@channel::text) s;

-- name: OutboxBlocked :many
-- A page of blocked keys by name. Plain read; the counts behind them stop at 10 000.
select k.key::text as key, k.reason::text as reason, k.since::timestamptz as since,
       greatest(extract(epoch from least(k.due_at, clock_timestamp() + interval '100 years') - clock_timestamp()), 0)::float8 as due_in,
       k.head, coalesce(k.topic, '')::text as topic, coalesce(k.attempts, 0)::integer as attempts,
       coalesce(k.last_error, '')::text as last_error, k.waiting::bigint as waiting
from commitbox.outbox_blocked_keys k
where k.channel = @channel::text and k.key > @after_key::text
order by k.key limit @page::integer;

-- name: OutboxDead :many
-- A page of dead messages by position and id, without their payloads: a server that lost commits draws positions again, so two
-- may have one. Plain read by primary key or by (channel, topic, dead_at).
select d.id, d.message_id, d.topic, coalesce(d.key, '')::text as key, d.attempts, d.created_at, d.dead_at,
       coalesce(d.last_error, '')::text as last_error, octet_length(d.payload)::integer as payload_len,
       d.discarded_at, coalesce(d.discarded_by, '')::text as discarded_by
from commitbox.outbox_dead d
where d.channel = @channel::text and (@topic::text = '' or d.topic = @topic::text)
  and (d.id, d.message_id) > (@after_id::bigint, @after_message::uuid)
order by d.id, d.message_id limit @page::integer;

-- name: OutboxRequeue :one
-- Calls outbox_requeue: locks the shard of one dead message, found by message id, and moves it back.
select commitbox.outbox_requeue(@channel::text, @message_id::uuid, sqlc.narg('reason')::text)::boolean as done;

-- name: OutboxRequeueMany :one
-- Calls outbox_requeue_many: locks the shards of dead messages in order, and moves a few back, the oldest first.
select commitbox.outbox_requeue_many(@channel::text, sqlc.narg('topic')::text, sqlc.narg('since')::timestamptz, sqlc.narg('until')::timestamptz,
    @at_most::integer, @dry_run::boolean, sqlc.narg('reason')::text)::bigint as done;

-- name: OutboxDiscard :one
-- Calls outbox_discard: locks the shard of one dead message, found by message id, and marks it; its key goes on.
select commitbox.outbox_discard(@channel::text, @message_id::uuid, sqlc.narg('reason')::text)::boolean as done;

-- name: OutboxRetry :one
-- Calls outbox_retry: locks the shard of the key and makes a blocked key due.
select commitbox.outbox_retry(@channel::text, @key::text, sqlc.narg('reason')::text)::boolean as done;

-- name: OutboxPark :one
-- Calls outbox_park: locks the shard of the key and blocks it until it is released.
select commitbox.outbox_park(@channel::text, @key::text, sqlc.narg('reason')::text)::boolean as done;

-- name: OutboxRelease :one
-- Calls outbox_release: locks the shard of the key and makes a parked key due.
select commitbox.outbox_release(@channel::text, @key::text, sqlc.narg('reason')::text)::boolean as done;

-- name: OutboxSkipHead :one
-- Calls outbox_skip_head: locks the shard of the key and moves the first message out of its way. Null: there was nothing to skip.
select commitbox.outbox_skip_head(@channel::text, @key::text, sqlc.narg('reason')::text)::uuid as head;

-- name: OutboxNow :one
-- The time by the clock that writes when messages die and when they are kept; touches no table.
select clock_timestamp()::timestamptz as at;
