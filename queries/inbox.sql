-- name: InboxClaim :execrows
-- The first delivery: takes the message's advisory lock and inserts the row as completed, which the handler's own
-- commit makes true. A row written means "ours, run the handler"; none means nothing about the row, which is then
-- read by InboxLook. The count says it: RETURNING would make the server put the answer into a tuplestore first, a tenth of
-- what the statement costs. The times are the statement's, because a volatile function among the values keeps the planner from
-- merging them into the insert, another tenth. Locks: the advisory lock of the message (tried, never waited for) and the new
-- row. Index: the primary key, for the conflict. Two replicas: the second one is refused by the lock, so it does not wait on the
-- unique index; without the lock it would, until the first one ends. There is no read of the table here: reading a key
-- that is missing makes unrelated messages collide under SERIALIZABLE, and a row read in the statement's batch could be
-- one's own. "do update ... where false" would write WAL for a duplicate; "do nothing" writes none.
insert into commitbox.inbox as i (consumer, message_id, status, attempts, received_at, fingerprint, trace_id, finished_at)
select @consumer::text, @message_id::text, 'completed', 1, statement_timestamp(), sqlc.narg('fingerprint')::bytea, sqlc.narg('trace_id')::text, statement_timestamp()
 where pg_try_advisory_xact_lock(commitbox.inbox_lock(@consumer::text, @message_id::text))
on conflict (consumer, message_id) do nothing;

-- name: InboxLook :one
-- What is known of a message after a claim that returned nothing: whether this transaction holds its lock now, and the
-- row if there is one. Locks: the advisory lock, tried. Index: primary key. Two replicas: completed and dead are final
-- and decide; everything else decides only if the lock is ours, because another transaction may be changing the row.
-- The row may be older than the lock; every write that follows repeats its guard. may_fill says that this transaction has
-- written nothing, so that what it sees is committed, and a cache may be told.
select pg_try_advisory_xact_lock(commitbox.inbox_lock(@consumer::text, @message_id::text))::boolean as mine,
       coalesce(i.status, '')::text as status,
       coalesce(i.attempts, 0)::integer as attempts,
       coalesce(i.epoch, 0)::bigint as epoch,
       coalesce(extract(epoch from coalesce(i.next_attempt_at, i.lease_until) - clock_timestamp()), 0)::float8 as due_in,
       i.fingerprint,
       i.result,
       (i.payload is not null)::boolean as payload_kept,
       coalesce(i.status in ('pending', 'failed') and exists (select from commitbox.inbox_step s
          where s.consumer = i.consumer and s.message_id = i.message_id), false)::boolean as has_steps,
       (current_setting('transaction_isolation') = 'read committed')::boolean as rereads,
       (pg_current_xact_id_if_assigned() is null)::boolean as may_fill, i.finished_at,
       coalesce(extract(epoch from clock_timestamp() - i.finished_at), 0)::float8 as age
  from (values (1)) as one (n)
  left join commitbox.inbox i on i.consumer = @consumer::text and i.message_id = @message_id::text;

-- name: InboxTakeover :one
-- Runs a failed message again, or one whose lease has expired, in this transaction: the row becomes completed, which
-- the handler's commit makes true. The epoch rises, so the former holder is fenced. Locks: the advisory lock (tried,
-- in a CTE column of its own, so that it is evaluated once) and the row, skipped if it is locked. Index: primary key.
-- Two replicas: one gets the locks; the guards on epoch, state and time are evaluated on the locked row. A message
-- that has stored steps is never taken over here: the handler would repeat them. The payload stays, because a failure
-- may be recorded in this transaction and nobody else may have it.
with l as materialized (
    select pg_try_advisory_xact_lock(commitbox.inbox_lock(@consumer::text, @message_id::text)) as ok
), k as materialized (
    select i.consumer, i.message_id
      from l join commitbox.inbox i on i.consumer = @consumer::text and i.message_id = @message_id::text
     where l.ok and i.epoch = @epoch::bigint and i.attempts < @max_attempts::integer
       and ((i.status = 'failed' and (i.next_attempt_at <= clock_timestamp() or @ignore_due::boolean))
         or (i.status = 'pending' and i.lease_until <= clock_timestamp()))
       and not exists (select from commitbox.inbox_step s where s.consumer = i.consumer and s.message_id = i.message_id)
       for no key update of i skip locked
)
update commitbox.inbox i
   set status = 'completed', attempts = i.attempts + 1, epoch = i.epoch + 1, lease_token = null, lease_until = null,
       next_attempt_at = null, last_error = null, finished_at = clock_timestamp(),
       fingerprint = coalesce(i.fingerprint, sqlc.narg('fingerprint')::bytea)
  from k
 where i.consumer = k.consumer and i.message_id = k.message_id
returning i.attempts, i.epoch;

-- name: InboxStoreResult :execrows
-- Stores the handler's result in its transaction; Process sends it together with COMMIT. Locks: the row, which this
-- transaction has written already. Index: primary key. finished_at stays as it is, so that the update is HOT.
update commitbox.inbox set result = @result::bytea
 where consumer = @consumer::text and message_id = @message_id::text and status = 'completed';

-- name: InboxFailHere :one
-- Records a failure in the transaction of the claim, after the handler's own writes were undone: Handle's rollback to
-- its savepoint. The claim has counted the attempt already. The epoch rises, so that InboxRecordFailure does not count
-- the same attempt again if its caller has committed this one. Locks: the row, which this transaction has written
-- already. Index: primary key. Two replicas: nobody else can see the row as completed before this commits.
update commitbox.inbox i
   set result = null, epoch = i.epoch + 1, last_error = @last_error::text,
       status = case when i.attempts >= @max_attempts::integer then 'dead' else 'failed' end,
       finished_at = case when i.attempts >= @max_attempts::integer then clock_timestamp() end,
       next_attempt_at = case when i.attempts < @max_attempts::integer then clock_timestamp() + commitbox.inbox_backoff(i.attempts, @backoff_base::float8, @backoff_max::float8) end
 where i.consumer = @consumer::text and i.message_id = @message_id::text and i.status = 'completed'
returning i.status, i.attempts, coalesce(extract(epoch from i.next_attempt_at - clock_timestamp()), 0)::float8 as due_in,
    (i.payload is not null)::boolean as payload_kept;
