-- name: InboxGet :one
-- One row for a person or a program that asks; see the function. A time that is not set is Go's zero time. Locks: none. Index:
-- primary key.
select g.status::text as status, g.attempts::integer as attempts, g.epoch::bigint as epoch, g.received_at::timestamptz as received_at,
       coalesce(g.finished_at, '0001-01-01 00:00+00')::timestamptz as finished_at, coalesce(g.due_at, '0001-01-01 00:00+00')::timestamptz as due_at, coalesce(g.last_error, '')::text as last_error, coalesce(g.trace_id, '')::text as trace_id,
       g.payload::bytea as payload, coalesce(g.headers, '{}')::text as headers, g.result::bytea as result
  from commitbox.inbox_get(@consumer::text, @message_id::text) g;

-- name: InboxList :many
-- A page of a consumer's rows of one status; see the function. Locks: none. Index: inbox_open or inbox_ended_at.
select l.message_id::text as message_id, l.attempts::integer as attempts, l.received_at::timestamptz as received_at,
       coalesce(l.finished_at, '0001-01-01 00:00+00')::timestamptz as finished_at, coalesce(l.due_at, '0001-01-01 00:00+00')::timestamptz as due_at,
       coalesce(l.last_error, '')::text as last_error, l.payload_kept::boolean as payload_kept
  from commitbox.inbox_list(@consumer::text, @status::text, make_interval(secs => @older_seconds::float8), @after_at::timestamptz, @after_id::text, @page::integer) l;

-- name: InboxStats :one
-- What of a consumer is not done; see the function. Locks: none. Index: inbox_open and inbox_ended_at.
select s.pending::bigint as pending, s.expired::bigint as expired, s.failed::bigint as failed, s.dead::bigint as dead, s.oldest_seconds::float8 as oldest_seconds
  from commitbox.inbox_stats(@consumer::text) s;

-- name: InboxConsumers :many
-- The names of all consumers. Locks: none. Index: primary key, one probe per consumer and no scan.
with recursive c as (
    (select i.consumer from commitbox.inbox i order by i.consumer limit 1)
    union all
    select (select i.consumer from commitbox.inbox i where i.consumer > c.consumer order by i.consumer limit 1)
      from c where c.consumer is not null
)
select c.consumer::text as consumer from c where c.consumer is not null;

-- name: InboxRunnable :many
-- A page of messages that nobody delivers any more and that the row itself can bring back: it holds the payload, and its
-- lease has expired or its next attempt is due. Locks: none; whoever runs one claims it. Index: inbox_open, as a range
-- behind the cursor, so that rows that stay runnable never hide those behind them.
select i.message_id, i.received_at
  from commitbox.inbox i
 where i.consumer = @consumer::text and i.finished_at is null and i.payload is not null
   and ((i.status = 'failed' and i.next_attempt_at <= statement_timestamp()) or (i.status = 'pending' and i.lease_until <= statement_timestamp()))
   and (i.received_at, i.message_id) > (@after_at::timestamptz, @after_id::text)
 order by i.received_at, i.message_id
 limit @page::integer;

-- name: InboxStored :one
-- The message that a row holds, to run it again. Nothing back: it ended meanwhile. Locks: none. Index: primary key.
select i.payload, coalesce(i.headers, '{}')::text as headers, i.fingerprint, coalesce(i.trace_id, '')::text as trace_id
  from commitbox.inbox i
 where i.consumer = @consumer::text and i.message_id = @message_id::text and i.payload is not null and i.finished_at is null;

-- name: InboxRequeue :one
-- See the function. Run under LockTimeout.
select coalesce(commitbox.inbox_requeue(@consumer::text, @message_id::text, sqlc.narg('reason')::text), '')::text;

-- name: InboxDiscard :one
-- See the function. Run under LockTimeout.
select commitbox.inbox_discard(@consumer::text, @message_id::text, sqlc.narg('reason')::text)::boolean;

-- name: InboxMarkCompleted :one
-- See the function. It waits for nobody.
select commitbox.inbox_mark_completed(@consumer::text, @message_id::text, sqlc.narg('result')::bytea, sqlc.narg('reason')::text)::text;
