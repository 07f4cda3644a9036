-- name: InboxGet :one
-- One row for a person or a program that asks. Locks: none. Index: primary key.
select i.status, i.attempts, i.epoch, i.received_at, i.finished_at, i.next_attempt_at, i.lease_until,
       coalesce(i.last_error, '')::text as last_error, coalesce(i.trace_id, '')::text as trace_id,
       i.payload, coalesce(i.headers, '{}')::text as headers, i.result
  from commitbox.inbox i
 where i.consumer = @consumer::text and i.message_id = @message_id::text;

-- name: InboxListOpen :many
-- A page of a consumer's unfinished rows, the oldest first, behind a cursor. Locks: none. Index: inbox_open, as a range
-- without a sort.
select i.message_id, i.attempts, i.received_at as at, coalesce(i.next_attempt_at, i.lease_until) as due_at,
       coalesce(i.last_error, '')::text as last_error, (i.payload is not null)::boolean as payload_kept
  from commitbox.inbox i
 where i.consumer = @consumer::text and i.finished_at is null and i.status = @status::text
   and i.received_at <= statement_timestamp() - make_interval(secs => @older_seconds::float8)
   and (i.received_at, i.message_id) > (@after_at::timestamptz, @after_id::text)
 order by i.received_at, i.message_id
 limit @page::integer;

-- name: InboxListEnded :many
-- A page of a consumer's completed or dead rows, the first ended first, behind a cursor. Locks: none. Index:
-- inbox_ended_at, as a range; rows of one instant are sorted by id.
select i.message_id, i.attempts, i.finished_at as at,
       coalesce(i.last_error, '')::text as last_error, (i.payload is not null)::boolean as payload_kept
  from commitbox.inbox i
 where i.consumer = @consumer::text and i.finished_at is not null and i.status = @status::text
   and i.finished_at <= statement_timestamp() - make_interval(secs => @older_seconds::float8)
   and (i.finished_at, i.message_id) > (@after_at::timestamptz, @after_id::text)
 order by i.finished_at, i.message_id
 limit @page::integer;

-- name: InboxStats :one
-- What of a consumer is not done. Locks: none. Indexes: inbox_open and the dead part of inbox_ended_at; completed rows
-- are not read.
select o.pending::bigint as pending, o.expired::bigint as expired, o.failed::bigint as failed, d.dead::bigint as dead,
       coalesce(extract(epoch from statement_timestamp() - o.oldest), 0)::float8 as oldest_seconds
  from (select count(*) filter (where i.status = 'pending') as pending,
               count(*) filter (where i.status = 'pending' and i.lease_until < statement_timestamp()) as expired,
               count(*) filter (where i.status = 'failed') as failed, min(i.received_at) as oldest
          from commitbox.inbox i where i.consumer = @consumer::text and i.finished_at is null) o,
       (select count(*) as dead
          from commitbox.inbox i where i.consumer = @consumer::text and i.finished_at is not null and i.status = 'dead') d;

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
