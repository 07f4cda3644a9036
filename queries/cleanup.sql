-- name: CleanupLead :one
-- Makes this transaction the only cleaner of the schema, or answers false at once: a transaction-level advisory lock, tried,
-- so it works through a transaction pooler and ends with its session. The transaction stays open and idle for the run; it
-- holds no snapshot and no row, so it holds back neither vacuum nor anybody else, and the server ends it when it was idle
-- for longer than a run may take, so that a cleaner that has lost its network is not the leader for ever. It is here for
-- economy: without it two cleaners skip each other's rows.
select set_config('idle_in_transaction_session_timeout', @idle_milliseconds::text, true)::text as idle,
       pg_try_advisory_xact_lock(hashtextextended('cleanup', 'commitbox.inbox'::regclass::oid::bigint))::boolean as lead;

-- name: CleanupTimeouts :exec
-- Bounds every statement and every lock wait of this transaction, and lets its COMMIT not wait for the disk or a standby, because a copy
-- of a message may wait for its row meanwhile. A crash may undo the last batches, which are then done again; it cannot undo one and
-- keep what a later transaction made of it, because that one's COMMIT is behind it in the log. No lock; set_config with true is
-- undone by the end of the transaction, so nothing is left in a pooler's session.
select set_config('statement_timeout', @statement_milliseconds::text, true), set_config('lock_timeout', @lock_milliseconds::text, true),
       set_config('synchronous_commit', 'off', true);

-- name: CleanupClock :one
-- The database's clock. Takes no lock. A run counts every age from this one reading, so that a clock that leaps in the middle
-- of a run does not make anything older.
select clock_timestamp()::timestamptz as at;

-- name: CleanupEnded :one
-- Removes a batch of a consumer's completed or dead rows that ended before the retention, the first ended first; returns how
-- many, and when the last of them ended, from where the run's next batch goes on: it would otherwise step over all that were
-- removed before it, for as long as any old snapshot keeps vacuum away. Index:
-- inbox_ended_at, as a range without a sort: clock_timestamp() is no index condition, statement_timestamp() is. Locks: the
-- rows, skipped if somebody has them, so that no two cleaners, nor a cleaner and a requeue, wait for each other or deadlock;
-- a row that was requeued meanwhile is looked at again in its newest version and left. The delete finds the rows by ctid:
-- joined by key the planner takes a nested loop over the consumer. Race: a copy of a message that waits for the row's
-- transaction finds no row and claims anew.
with gone as (
    delete from commitbox.inbox d
     where d.ctid = any (array(
        select i.ctid from commitbox.inbox i
         where i.consumer = @consumer::text and i.status = @status::text and i.status in ('completed', 'dead')
           and i.finished_at >= @after_at::timestamptz
           and i.finished_at < least(statement_timestamp(), @as_of::timestamptz) - make_interval(secs => @retention_seconds::float8)
         order by i.finished_at limit @at_most::integer
           for update skip locked
        ))
       and d.finished_at is not null
    returning d.finished_at
)
select count(*)::bigint as removed, coalesce(max(g.finished_at), @after_at::timestamptz)::timestamptz as last_at from gone g;

-- name: CleanupAbandon :one
-- Calls inbox_abandon, which makes failed rows dead that nobody has tried for longer than the policy says: row locks, skipped
-- if held, found by inbox_open.
select commitbox.inbox_abandon(@consumer::text, @as_of::timestamptz, @at_most::integer)::bigint;

-- name: CleanupDiscarded :execrows
-- Removes a batch of discarded messages past the retention, the only dead ones that may go. Index: outbox_dead_discarded_at.
-- Locks: the rows, skipped if an operator has them; a row that is requeued meanwhile has gone from the table, or is looked at again.
delete from commitbox.outbox_dead d
 where d.ctid = any (array(
    select o.ctid from commitbox.outbox_dead o
     where o.discarded_at < least(statement_timestamp(), @as_of::timestamptz) - make_interval(secs => @retention_seconds::float8)
     order by o.discarded_at limit @at_most::integer
       for update skip locked
    ))
   and d.discarded_at is not null;

-- name: CleanupGone :one
-- Calls forget_gone, which removes the rows of relays and replicas that ended long ago: row locks, skipped if held; a few
-- rows, no index.
select g.relays::bigint as relays, g.replicas::bigint as replicas from commitbox.forget_gone(@as_of::timestamptz, @at_most::integer) g;

-- name: CleanupSentDays :one
-- Calls outbox_sent_days for the longest time that any channel keeps what it sent. Callers at once go one after the other, by
-- an advisory lock of the function.
select d.made::integer as made, d.dropped::integer as dropped
  from commitbox.outbox_sent_days(7, (select max(c.keep_days) from commitbox.outbox_channel c)) d;

-- name: CleanupExpired :one
-- How many leases of a consumer have expired without anybody taking over, counted up to 10 000. Locks: none. Index: inbox_open.
select count(*)::bigint from (
    select 1 from commitbox.inbox i
     where i.consumer = @consumer::text and i.finished_at is null and i.status = 'pending' and i.lease_until < statement_timestamp() - interval '1 minute'
     limit 10000
) expired;

-- name: CleanupFuture :one
-- How many ended rows of a consumer will never be old, because they say that they ended in the future; counted up to 10 000.
-- Written by hand, or by a clock that was wrong. Locks: none. Index: inbox_ended_at, two ranges.
select count(*)::bigint from (
    (select 1 from commitbox.inbox i where i.consumer = @consumer::text and i.status = 'completed' and i.finished_at > statement_timestamp() + interval '1 hour' limit 10000)
    union all
    (select 1 from commitbox.inbox i where i.consumer = @consumer::text and i.status = 'dead' and i.finished_at > statement_timestamp() + interval '1 hour' limit 10000)
) future;

-- name: CleanupPolicies :many
-- How long the rows of each consumer are kept; '*' is for those without a policy of their own. Plain reads of a small table.
-- sound: the checks of the table hold, which a person may have switched off. A retention that means for ever counts as 900
-- years, before which there are times to compare with.
select p.consumer, coalesce(least(extract(epoch from p.retention), 900 * 31557600::numeric), 0)::float8 as retention,
       coalesce(least(extract(epoch from p.dead_retention), 900 * 31557600::numeric), 0)::float8 as dead_retention,
       coalesce(p.retention >= p.retry_horizon and p.dead_retention >= p.retry_horizon and p.abandon_after > interval '0', false)::boolean as sound
  from commitbox.inbox_policies p;

-- name: MissingRights :many
-- What the session's role lacks for a kind of work, as the statements that would grant it. Reads the catalogue only.
select m::text from commitbox.missing_rights(@kind::text) m;

-- name: CleanupSizes :many
-- What each table of the schema takes on disk, its indexes, its oversized values and its days included. Locks: none to speak
-- of. Index: none needed, the catalog has a row per table. A table that is dropped meanwhile counts as nothing.
select root.relname::text as name, coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint as bytes
  from pg_catalog.pg_class c join pg_catalog.pg_class root on root.oid = coalesce(pg_partition_root(c.oid), c.oid)
 where c.relkind = 'r' and c.relnamespace = (select n.relnamespace from pg_catalog.pg_class n where n.oid = 'commitbox.inbox'::regclass)
 group by root.relname
 order by root.relname;
