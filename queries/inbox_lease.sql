-- name: InboxAcquire :one
-- Takes the lease of a message in one autocommitted statement: a new row, an expired lease, or a failed row that is due.
-- The same token gets the same lease again, so that a caller whose answer was lost is not locked out; a message that
-- has used up its attempts becomes dead here, or else a crash loop would never end. Nothing back: look at the row.
-- Locks: the advisory lock (tried, in a column of a materialized CTE), then the row, skipped if it is locked: a
-- completing transaction that is open holds it. Index: primary key. Two replicas: the lock admits one; the
-- NOT EXISTS keeps the insert from waiting for a row that is deleted or inserted by an open transaction. A row with
-- another fingerprint is not taken.
with l as materialized (
    select pg_try_advisory_xact_lock(commitbox.inbox_lock(@consumer::text, @message_id::text)) as ok
), n as (
    insert into commitbox.inbox as i (consumer, message_id, status, attempts, epoch, lease_token, lease_until, fingerprint, payload, headers, trace_id)
    select @consumer::text, @message_id::text, 'pending', 1, 1, @token::uuid, clock_timestamp() + make_interval(secs => @lease_seconds::float8),
           sqlc.narg('fingerprint')::bytea, sqlc.narg('payload')::bytea, sqlc.narg('headers')::text::jsonb, sqlc.narg('trace_id')::text
      from l
     where l.ok and not exists (select from commitbox.inbox o where o.consumer = @consumer::text and o.message_id = @message_id::text)
    on conflict (consumer, message_id) do nothing
    returning i.status, i.attempts, i.epoch, i.received_at, i.payload is not null as payload_kept
), k as materialized (
    select i.consumer, i.message_id, i.lease_token is not distinct from @token::uuid as same
      from l join commitbox.inbox i on i.consumer = @consumer::text and i.message_id = @message_id::text
     where l.ok
       and ((i.status = 'pending' and (i.lease_until <= clock_timestamp() or i.lease_token = @token::uuid))
         or (i.status = 'failed' and (i.next_attempt_at <= clock_timestamp() or @ignore_due::boolean)))
       and (i.fingerprint is null or sqlc.narg('fingerprint')::bytea is null or i.fingerprint = sqlc.narg('fingerprint')::bytea
         or get_byte(i.fingerprint, 0) <> get_byte(sqlc.narg('fingerprint')::bytea, 0))
       for no key update of i skip locked
), u as (
    update commitbox.inbox i
       set status = case when k.same or i.attempts < @max_attempts::integer then 'pending' else 'dead' end,
           attempts = i.attempts + (not k.same and i.attempts < @max_attempts::integer)::integer,
           epoch = i.epoch + (not k.same)::integer,
           lease_token = case when k.same or i.attempts < @max_attempts::integer then @token::uuid end,
           lease_until = case when k.same or i.attempts < @max_attempts::integer then clock_timestamp() + make_interval(secs => @lease_seconds::float8) end,
           finished_at = case when not k.same and i.attempts >= @max_attempts::integer then clock_timestamp() end,
           next_attempt_at = null,
           fingerprint = coalesce(i.fingerprint, sqlc.narg('fingerprint')::bytea),
           payload = coalesce(i.payload, sqlc.narg('payload')::bytea),
           headers = coalesce(i.headers, sqlc.narg('headers')::text::jsonb)
      from k
     where i.consumer = k.consumer and i.message_id = k.message_id
    returning i.status, i.attempts, i.epoch, i.received_at, i.payload is not null as payload_kept
)
select n.status::text as status, n.attempts::integer as attempts, n.epoch::bigint as epoch, n.received_at::timestamptz as received_at,
       n.payload_kept::boolean as payload_kept from n
union all
select u.status, u.attempts, u.epoch, u.received_at, u.payload_kept from u;

-- name: InboxRenew :execrows
-- Moves the end of a lease. Locks: the row, skipped if it is locked, because the holder's own completing transaction
-- locks it: no row is then no loss, ask InboxHeld. Index: primary key; lease_until is in no index, so the update is
-- HOT. Two replicas: epoch and token admit the holder only.
with k as materialized (
    select i.consumer, i.message_id from commitbox.inbox i
     where i.consumer = @consumer::text and i.message_id = @message_id::text and i.status = 'pending'
       and i.epoch = @epoch::bigint and i.lease_token = @token::uuid
       for no key update skip locked
)
update commitbox.inbox i set lease_until = clock_timestamp() + make_interval(secs => @lease_seconds::float8)
  from k where i.consumer = k.consumer and i.message_id = k.message_id;

-- name: InboxHeld :one
-- What became of a lease, by a plain read that waits for nobody. Nothing back: another epoch, so it is lost. Pending
-- with the token: still held, the row is locked by a transaction that is open. Any other state: the holder's own write,
-- whose answer was lost, because every other write raises the epoch. received_at tells the row from a later one of the
-- same id, whose epochs begin anew. Locks: none. Index: primary key.
select i.status, (i.lease_token is not distinct from @token::uuid)::boolean as same, i.attempts,
       coalesce(extract(epoch from i.next_attempt_at - clock_timestamp()), 0)::float8 as due_in,
       (i.payload is not null)::boolean as payload_kept
  from commitbox.inbox i
 where i.consumer = @consumer::text and i.message_id = @message_id::text and i.epoch = @epoch::bigint
   and i.received_at = @received_at::timestamptz;

-- name: InboxTryLock :one
-- Takes the message's advisory lock if it is free, before a row is changed in a transaction that then runs user code: a
-- claim would otherwise wait for that row. The answer is no condition; the guard is the epoch.
select pg_try_advisory_xact_lock(commitbox.inbox_lock(@consumer::text, @message_id::text))::boolean;

-- name: InboxComplete :execrows
-- Completes leased work, alone or as the first statement of the business transaction. No row: ask InboxHeld. Locks:
-- follows InboxTryLock; the row, skipped if it is locked. Index: primary key. Two replicas: epoch and token admit the
-- holder only; from here on the row lock is the lease, until the transaction ends.
with k as materialized (
    select i.consumer, i.message_id from commitbox.inbox i
     where i.consumer = @consumer::text and i.message_id = @message_id::text and i.status = 'pending'
       and i.epoch = @epoch::bigint and i.lease_token = @token::uuid
       for no key update skip locked
)
update commitbox.inbox i
   set status = 'completed', result = sqlc.narg('result')::bytea, finished_at = clock_timestamp(), lease_token = null, lease_until = null,
       last_error = null, payload = null, headers = null
  from k where i.consumer = k.consumer and i.message_id = k.message_id;

-- name: InboxLeaseFail :one
-- Ends leased work with a failure. Nothing back: ask InboxHeld. Locks: the row, skipped if it is locked. Index: primary
-- key. Two replicas: epoch and token admit the holder only.
with k as materialized (
    select i.consumer, i.message_id from commitbox.inbox i
     where i.consumer = @consumer::text and i.message_id = @message_id::text and i.status = 'pending'
       and i.epoch = @epoch::bigint and i.lease_token = @token::uuid
       for no key update skip locked
)
update commitbox.inbox i
   set last_error = @last_error::text, lease_token = null, lease_until = null,
       status = case when i.attempts >= @max_attempts::integer then 'dead' else 'failed' end,
       finished_at = case when i.attempts >= @max_attempts::integer then clock_timestamp() end,
       next_attempt_at = case when i.attempts < @max_attempts::integer then
           clock_timestamp() + commitbox.inbox_backoff(i.attempts, @backoff_base::float8, @backoff_max::float8) end
  from k where i.consumer = k.consumer and i.message_id = k.message_id
returning i.status, i.attempts, coalesce(extract(epoch from i.next_attempt_at - clock_timestamp()), 0)::float8 as due_in,
    (i.payload is not null)::boolean as payload_kept;

-- name: InboxRelease :execrows
-- Gives a lease back unused, by a holder that stops: due now, and the attempt is not counted. Locks: the row, skipped if
-- it is locked. Index: primary key. Two replicas: epoch and token admit the holder only.
with k as materialized (
    select i.consumer, i.message_id from commitbox.inbox i
     where i.consumer = @consumer::text and i.message_id = @message_id::text and i.status = 'pending'
       and i.epoch = @epoch::bigint and i.lease_token = @token::uuid
       for no key update skip locked
)
update commitbox.inbox i
   set status = 'failed', attempts = i.attempts - 1, lease_token = null, lease_until = null, next_attempt_at = clock_timestamp()
  from k where i.consumer = k.consumer and i.message_id = k.message_id;

-- name: InboxStepLook :one
-- The stored result of a step, asked for by the holder of the lease. Nothing back: the lease is lost. Locks: none; what
-- the holder then does outside the database is covered by the lease's time, and InboxStepStore checks again. Index: both
-- primary keys.
select (s.name is not null)::boolean as stored, s.result
  from commitbox.inbox i
  left join commitbox.inbox_step s on s.consumer = i.consumer and s.message_id = i.message_id and s.name = @name::text
 where i.consumer = @consumer::text and i.message_id = @message_id::text and i.status = 'pending'
   and i.epoch = @epoch::bigint and i.lease_token = @token::uuid;

-- name: InboxStepStore :execrows
-- Stores the result of a step once. No row: it is stored already, or the lease is lost; ask InboxStepLook. Locks: the
-- message's row FOR NO KEY UPDATE, so that a takeover skips it until the step is committed; with FOR KEY SHARE the step
-- of a former holder could commit after the takeover. Index: both primary keys. Two replicas: epoch and token.
with g as materialized (
    select 1 from commitbox.inbox i
     where i.consumer = @consumer::text and i.message_id = @message_id::text and i.status = 'pending'
       and i.epoch = @epoch::bigint and i.lease_token = @token::uuid
       for no key update
)
insert into commitbox.inbox_step (consumer, message_id, name, epoch, result)
select @consumer::text, @message_id::text, @name::text, @epoch::bigint, sqlc.narg('result')::bytea from g
on conflict do nothing;
