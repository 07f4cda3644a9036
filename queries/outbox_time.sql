-- name: MoveScheduled :one
-- Gives due messages their place in hot, in order of their time, and tells how many, and the seconds until the next one. One
-- relay of a channel at a time: the advisory lock, tried for this statement's transaction, keeps the order of those of one
-- key. one.n makes the planner ask for the lock first: who has it not would lock rows, and he who has it would skip them.
-- SKIP LOCKED leaves a row alone that somebody is about to cancel. Primary key, then ctid: the rows are locked; the delete decides. The new
-- positions are drawn under the row-exclusive lock on hot, like those of any writer.
with lead as materialized (
    select pg_try_advisory_xact_lock(hashtextextended(@channel::text, 'commitbox.outbox_scheduled'::regclass::oid::bigint)) as ok
), gone as (
    delete from commitbox.outbox_scheduled s where s.ctid = any (array(
        select d.ctid from rows from (generate_series(1, (select ok::integer from lead))) as one (n) cross join lateral (
            select h.ctid from commitbox.outbox_scheduled h
            where h.channel = @channel::text and h.due_at <= statement_timestamp()
            order by h.due_at, h.id limit one.n * @at_most::integer
            for update skip locked
        ) d
    ))
    returning s.due_at, s.id, s.created_at, s.message_id, s.channel, s.key, s.topic, s.content_type, s.headers, s.payload
), moved as (
    insert into commitbox.outbox_message (created_at, message_id, channel, key, topic, content_type, headers, payload)
    select g.created_at, g.message_id, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload from gone g order by g.due_at, g.id
    returning 1 as one
)
select (select count(*) from moved)::bigint as moved,
       coalesce(extract(epoch from (
           select s.due_at from commitbox.outbox_scheduled s where s.channel = @channel::text and s.due_at > statement_timestamp() order by s.due_at limit 1
       ) - clock_timestamp()), 'infinity')::float8 as next_in;

-- name: KeepAt :execrows
-- DeleteAt for a channel that keeps what was sent. The delete decides: of two that confirm one message, one keeps it. In the order
-- of positions, because each row's time is taken as it is inserted and replay goes by it; the delete returns them in that of
-- their places.
with gone as (
    delete from commitbox.outbox_message o
    where o.ctid = any (array(select unnest(@places::tid[])))
      and ((o.id, o.message_id) in (select c.id, c.message_id from rows from (unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (id, message_id))) is true
    returning o.id, o.created_at, o.message_id, o.shard, o.channel, o.key, o.topic, o.content_type, o.headers, o.payload
)
insert into commitbox.outbox_sent (id, created_at, message_id, shard, channel, key, topic, content_type, headers, payload)
select g.id, g.created_at, g.message_id, g.shard, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload from gone g order by g.id;

-- name: KeepConfirmed :execrows
-- DeleteConfirmed for a channel that keeps what was sent, from hot, deferred or dead. The deletes decide: of two that confirm
-- one message, one keeps it. In order, as in KeepAt. Primary keys, then ctid.
with hot as (
    delete from commitbox.outbox_message m where m.ctid = any (array(
        select p.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (shard, id, message_id)
        cross join lateral (
            select h.ctid from commitbox.outbox_message h
            where h.channel = @channel and h.shard = c.shard and h.id = c.id and h.message_id = c.message_id limit 1
        ) p
    ))
    returning m.id, m.created_at, m.message_id, m.shard, m.channel, m.key, m.topic, m.content_type, m.headers, m.payload
), deferred as (
    delete from commitbox.outbox_deferred d where d.ctid = any (array(
        select p.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (shard, id, message_id)
        cross join lateral (
            select h.ctid from commitbox.outbox_deferred h
            where h.channel = @channel and h.shard = c.shard and h.id = c.id and h.message_id = c.message_id limit 1
        ) p
    ))
    returning d.id, d.created_at, d.message_id, d.shard, d.channel, d.key, d.topic, d.content_type, d.headers, d.payload
), dead as (
    delete from commitbox.outbox_dead e where e.ctid = any (array(
        select p.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (shard, id, message_id)
        cross join lateral (
            select h.ctid from commitbox.outbox_dead h
            where h.channel = @channel and h.shard = c.shard and h.id = c.id and h.message_id = c.message_id limit 1
        ) p
    ))
    returning e.id, e.created_at, e.message_id, e.shard, e.channel, e.key, e.topic, e.content_type, e.headers, e.payload
), gone as (
    select hot.id, hot.created_at, hot.message_id, hot.shard, hot.channel, hot.key, hot.topic, hot.content_type, hot.headers, hot.payload from hot
    union all select deferred.id, deferred.created_at, deferred.message_id, deferred.shard, deferred.channel, deferred.key, deferred.topic, deferred.content_type, deferred.headers, deferred.payload from deferred
    union all select dead.id, dead.created_at, dead.message_id, dead.shard, dead.channel, dead.key, dead.topic, dead.content_type, dead.headers, dead.payload from dead
)
insert into commitbox.outbox_sent (id, created_at, message_id, shard, channel, key, topic, content_type, headers, payload)
select g.id, g.created_at, g.message_id, g.shard, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload from gone g order by g.id;

-- name: SentDays :exec
-- Makes the days that come and drops those that are not kept any more by any channel. See the function; a few catalogue reads
-- when there is nothing to do.
select d.made from commitbox.outbox_sent_days(7, (select max(c.keep_days) from commitbox.outbox_channel c)) d;

-- name: Replay :one
-- Calls outbox_replay: reads kept messages of some days and inserts them into hot.
select r.done::bigint as done, coalesce(r.last_at, @since::timestamptz)::timestamptz as last_at, coalesce(r.last_id, 0)::bigint as last_id
from commitbox.outbox_replay(@channel::text, @since::timestamptz, @until::timestamptz, sqlc.narg('topic')::text, sqlc.narg('key')::text,
    @after_at::timestamptz, @after_id::bigint, @at_most::integer, @dry_run::boolean, sqlc.narg('reason')::text) r;
