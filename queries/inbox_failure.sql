-- name: InboxLock :exec
-- Waits for the message's advisory lock, which a running duplicate holds until it ends. Only for short transactions
-- of the library's own, under LockTimeout; a statement in a caller's transaction never waits.
select pg_advisory_xact_lock(commitbox.inbox_lock(@consumer::text, @message_id::text));

-- name: InboxRecordFailure :one
-- Counts a failed attempt after its transaction was rolled back. Nothing back: the row is no longer what the attempt
-- saw (completed, dead, leased, requeued) and stays as it is. A lease that had expired and was taken over by the attempt
-- ends here, and the new epoch fences its holder; if it stayed, the failures of its successors would never count. A copy
-- with another fingerprint changes nothing: it would replace the payload of the message that the row is about. Locks:
-- follows InboxLock in a transaction, then the row. Index: primary key. Two replicas: attempts are incremented, never set; the epoch keeps a late record from eating an
-- attempt of a row that was requeued meanwhile. A negative epoch records against whatever epoch the row has. The
-- payload is kept when the message is given up, because then no broker may have it any more.
insert into commitbox.inbox as i (consumer, message_id, status, attempts, epoch, last_error, fingerprint, trace_id,
    payload, headers, finished_at, next_attempt_at)
values (@consumer::text, @message_id::text, case when @max_attempts::integer <= 1 then 'dead' else 'failed' end, 1,
    greatest(@epoch::bigint, 0), @last_error::text, sqlc.narg('fingerprint')::bytea, sqlc.narg('trace_id')::text,
    case when @max_attempts::integer <= 1 then sqlc.narg('payload')::bytea end,
    case when @max_attempts::integer <= 1 then sqlc.narg('headers')::text::jsonb end,
    case when @max_attempts::integer <= 1 then clock_timestamp() end,
    case when @max_attempts::integer > 1 then clock_timestamp() + commitbox.inbox_backoff(1, @backoff_base::float8, @backoff_max::float8) end)
on conflict (consumer, message_id) do update
   set attempts = i.attempts + 1, last_error = excluded.last_error, lease_token = null, lease_until = null,
       epoch = i.epoch + (i.status = 'pending')::integer,
       status = case when i.attempts + 1 >= @max_attempts::integer then 'dead' else 'failed' end,
       payload = case when i.attempts + 1 >= @max_attempts::integer then coalesce(sqlc.narg('payload')::bytea, i.payload) else i.payload end,
       headers = case when i.attempts + 1 >= @max_attempts::integer then coalesce(sqlc.narg('headers')::text::jsonb, i.headers) else i.headers end,
       finished_at = case when i.attempts + 1 >= @max_attempts::integer then clock_timestamp() end,
       next_attempt_at = case when i.attempts + 1 < @max_attempts::integer then clock_timestamp() + commitbox.inbox_backoff(i.attempts + 1, @backoff_base::float8, @backoff_max::float8) end
 where (i.status = 'failed' or (i.status = 'pending' and i.lease_until <= clock_timestamp()))
   and (i.epoch = @epoch::bigint or @epoch::bigint < 0)
   and (i.fingerprint is null or excluded.fingerprint is null or i.fingerprint = excluded.fingerprint
     or get_byte(i.fingerprint, 0) <> get_byte(excluded.fingerprint, 0))
returning i.status, i.attempts, coalesce(extract(epoch from i.next_attempt_at - clock_timestamp()), 0)::float8 as due_in,
    (i.payload is not null)::boolean as payload_kept;

-- name: InboxLeaveTrace :execrows
-- Leaves a row without an attempt, due at once, before a message runs that has none and that the broker has delivered
-- too often: if the run kills the process, the row says that there was one. No row: there is one already. Locks: follows
-- InboxLock in a transaction. Index: primary key, for the conflict. Two replicas: one inserts.
insert into commitbox.inbox (consumer, message_id, status, last_error, fingerprint, trace_id, next_attempt_at)
values (@consumer::text, @message_id::text, 'failed', @last_error::text, sqlc.narg('fingerprint')::bytea, sqlc.narg('trace_id')::text, clock_timestamp())
on conflict (consumer, message_id) do nothing;

-- name: InboxBury :one
-- Makes a failed row dead without another attempt, because the limit was lowered below what it has used. Nothing back:
-- the row is no longer what was seen. Locks: the row, skipped if it is locked. Index: primary key. Two replicas: the
-- epoch and the state are tested on the locked row.
with k as materialized (
    select i.consumer, i.message_id from commitbox.inbox i
     where i.consumer = @consumer::text and i.message_id = @message_id::text and i.status = 'failed'
       and i.epoch = @epoch::bigint and i.attempts >= @max_attempts::integer
       for no key update skip locked
)
update commitbox.inbox i
   set status = 'dead', finished_at = clock_timestamp(), next_attempt_at = null,
       payload = coalesce(sqlc.narg('payload')::bytea, i.payload), headers = coalesce(sqlc.narg('headers')::text::jsonb, i.headers)
  from k
 where i.consumer = k.consumer and i.message_id = k.message_id
returning i.status, i.attempts, (i.payload is not null)::boolean as payload_kept;
