-- name: DeleteAt :execrows
-- Removes messages that the broker confirmed, from where they were read. Not fenced: that it was confirmed is true whoever
-- says it. A scan by ctid, the shortest way: rows in hot are never updated, so a ctid stays that of its message, until the
-- table is rewritten (VACUUM FULL) or the row has gone and another one lies there. So position and id are compared too, as a
-- pair ("is true" keeps it a hashed look-up; as a join the planner would sort both sides). The sub-select hides the number
-- of places from the planner, which would read a whole table of a few thousand pages instead. Row locks of one statement,
-- taken by nobody else. 0 or 1 row each; what is missing is looked for by DeleteConfirmed.
delete from commitbox.outbox_message o
where o.ctid = any (array(select unnest(@places::tid[])))
  and ((o.id, o.message_id) in (select c.id, c.message_id from rows from (unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (id, message_id))) is true;

-- name: DeleteConfirmed :execrows
-- DeleteAt by position, for what does not lie any more where it was read. Their ids are
-- compared: a server that lost commits draws positions again, for other messages. One probe of the primary key for each, then
-- a scan by ctid: joined to the positions, the planner takes a hash join over the whole channel, dead rows included, while
-- the table has no statistics. 0 or 1 row each; a shortfall means that a later owner moved the row.
delete from commitbox.outbox_message o
where o.ctid = any (array(
    select m.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (shard, id, message_id)
    cross join lateral (
        select h.ctid from commitbox.outbox_message h
        where h.channel = @channel and h.shard = c.shard and h.id = c.id and h.message_id = c.message_id limit 1
    ) m
));

-- name: DeleteConfirmedDeferred :execrows
-- The same for messages published straight from deferred, and for confirmed ones that were moved there meanwhile.
delete from commitbox.outbox_deferred o
where o.ctid = any (array(
    select m.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (shard, id, message_id)
    cross join lateral (
        select h.ctid from commitbox.outbox_deferred h
        where h.channel = @channel and h.shard = c.shard and h.id = c.id and h.message_id = c.message_id limit 1
    ) m
));

-- name: DeleteConfirmedDead :execrows
-- The same for confirmed messages that were declared dead meanwhile.
delete from commitbox.outbox_dead o
where o.ctid = any (array(
    select m.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (shard, id, message_id)
    cross join lateral (
        select h.ctid from commitbox.outbox_dead h
        where h.channel = @channel and h.shard = c.shard and h.id = c.id and h.message_id = c.message_id limit 1
    ) m
));

-- name: Fence :many
-- The first statement of every change of state: locks the shard rows in key order and returns those still held under
-- the epoch sent; the others are lost. Waiting behind a takeover re-checks owner and epoch on the newest version. What
-- follows looks in fresh statements of the same transaction.
select s.shard from commitbox.outbox_shard s
where s.channel = @channel and s.owner = @owner::uuid
  and (s.shard, s.epoch) in (select f.shard, f.epoch from rows from (unnest(@shards::smallint[]), unnest(@epochs::bigint[])) as f (shard, epoch))
order by s.shard for no key update;

-- name: BlockKeys :exec
-- Blocks keys, or moves the due time of keys that wait for a retry. After the fence. Primary key, in key order. A key
-- that an operator parked or that a dead message holds keeps its reason.
insert into commitbox.outbox_blocked as b (channel, shard, key, due_at, reason)
select @channel, u.shard, u.key, clock_timestamp() + make_interval(secs => u.delay), 'retry'
from rows from (unnest(@shards::smallint[]), unnest(@keys::text[]), unnest(@delays::float8[])) as u (shard, key, delay)
order by u.shard, u.key
on conflict (channel, shard, key) do update set due_at = excluded.due_at where b.reason = 'retry';

-- name: DeferMessages :execrows
-- Moves messages from hot to deferred: a failed head with its error, a follower (that MoveFollowers did not find) with none.
-- After the fence. Primary key, then ctid, as in DeleteConfirmed. A row that somebody removed meanwhile is not there and is not made again.
with u as materialized (
    select x.shard, x.id, x.attempts, x.error, x.delay
    from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@attempts::integer[]), unnest(@errors::text[]), unnest(@delays::float8[]))
        as x (shard, id, attempts, error, delay)
), gone as (
    delete from commitbox.outbox_message m where m.ctid = any (array(
        select p.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[])) as c (shard, id) cross join lateral (
            select h.ctid from commitbox.outbox_message h where h.channel = @channel and h.shard = c.shard and h.id = c.id limit 1
        ) p
    ))
    returning m.id, m.created_at, m.message_id, m.shard, m.channel, m.key, m.topic, m.content_type, m.headers, m.payload
)
insert into commitbox.outbox_deferred (id, created_at, message_id, shard, attempts, channel, key, topic, content_type, headers, payload, due_at, last_error)
select g.id, g.created_at, g.message_id, g.shard, u.attempts, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload,
       case when g.key is null then clock_timestamp() + make_interval(secs => u.delay) end, nullif(u.error, '')
from gone g join u on u.shard = g.shard and u.id = g.id;

-- name: MoveFollowers :execrows
-- DeferMessages for what comes behind a failed message, from where it was read: there is no error to record. It is its own fence:
-- it locks the shards' rows, and behind a takeover they are looked at again. So its look at the messages may be older than
-- its lock; nobody else changes them under this epoch, what an operator removed meanwhile is not there, and a key that he freed
-- fails the foreign key. By ctid, position and id compared, as in DeleteAt; what is missing is looked for by DeferMessages.
with held as materialized (
    select s.shard from commitbox.outbox_shard s
    where s.channel = @channel and s.owner = @owner::uuid
      and (s.shard, s.epoch) in (select f.shard, f.epoch from rows from (unnest(@shards::smallint[]), unnest(@epochs::bigint[])) as f (shard, epoch))
    order by s.shard for no key update
), gone as (
    delete from commitbox.outbox_message m
    where m.ctid = any (array(select unnest(@places::tid[])))
      and ((m.id, m.message_id) in (select c.id, c.message_id from rows from (unnest(@ids::bigint[]), unnest(@message_ids::uuid[])) as c (id, message_id))) is true
      and m.shard = any (array(select held.shard from held))
    returning m.id, m.created_at, m.message_id, m.shard, m.channel, m.key, m.topic, m.content_type, m.headers, m.payload
)
insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, key, topic, content_type, headers, payload)
select g.id, g.created_at, g.message_id, g.shard, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload from gone g;

-- name: FailDeferred :execrows
-- Counts a further failure of deferred messages, or only sets their error and time where nothing was spent (0). After the
-- fence. Primary key.
update commitbox.outbox_deferred d
set attempts = d.attempts + u.spent, last_error = case when u.spent > 0 then u.error else d.last_error end,
    due_at = case when d.key is null then clock_timestamp() + make_interval(secs => u.delay) end
from rows from (
    unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@spent::integer[]), unnest(@errors::text[]), unnest(@delays::float8[])
) as u (shard, id, spent, error, delay)
where d.channel = @channel and d.shard = u.shard and d.id = u.id;

-- name: BuryMessages :execrows
-- Declares messages dead, from where they were read: under the fence nobody moves them, and another message may have the same
-- position in the other table. Primary keys, then ctid, as in DeleteConfirmed. The deletes decide: a row that somebody
-- removed meanwhile is not made again.
with u as materialized (
    select x.shard, x.id, x.error
    from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@errors::text[])) as x (shard, id, error)
), hot as (
    delete from commitbox.outbox_message m where m.ctid = any (array(
        select p.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@deferred::boolean[])) as c (shard, id, deferred) cross join lateral (
            select h.ctid from commitbox.outbox_message h where not c.deferred and h.channel = @channel and h.shard = c.shard and h.id = c.id limit 1
        ) p
    ))
    returning m.id, m.created_at, m.message_id, m.shard, 0 as attempts, m.channel, m.key, m.topic, m.content_type, m.headers, m.payload
), deferred as (
    delete from commitbox.outbox_deferred d where d.ctid = any (array(
        select p.ctid from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@deferred::boolean[])) as c (shard, id, deferred) cross join lateral (
            select h.ctid from commitbox.outbox_deferred h where c.deferred and h.channel = @channel and h.shard = c.shard and h.id = c.id limit 1
        ) p
    ))
    returning d.id, d.created_at, d.message_id, d.shard, d.attempts, d.channel, d.key, d.topic, d.content_type, d.headers, d.payload
), gone as (
    select hot.id, hot.created_at, hot.message_id, hot.shard, hot.attempts, hot.channel, hot.key, hot.topic, hot.content_type, hot.headers, hot.payload from hot
    union all select deferred.id, deferred.created_at, deferred.message_id, deferred.shard, deferred.attempts, deferred.channel, deferred.key, deferred.topic, deferred.content_type, deferred.headers, deferred.payload from deferred
)
insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, key, topic, content_type, headers, payload, last_error)
select g.id, g.created_at, g.message_id, g.shard, g.attempts + 1, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload, nullif(u.error, '')
from gone g join u on u.shard = g.shard and u.id = g.id;

-- name: HoldKeys :exec
-- Policy hold: the dead message keeps its key blocked until an operator decides, a parked one too. After the fence. Primary key,
-- in key order.
insert into commitbox.outbox_blocked as b (channel, shard, key, due_at, reason, dead_id)
select @channel, u.shard, u.key, 'infinity', 'dead', u.id
from rows from (unnest(@shards::smallint[]), unnest(@keys::text[]), unnest(@ids::bigint[])) as u (shard, key, id)
order by u.shard, u.key
on conflict (channel, shard, key) do update set due_at = 'infinity', reason = 'dead', dead_id = excluded.dead_id where b.reason <> 'dead';

-- name: UnblockKeys :many
-- Lets keys flow again behind which nothing is left. After the fence, as its own statement: a look in the statement
-- that takes the fence sees the time before it waited. Returns the keys that are free now.
delete from commitbox.outbox_blocked b
using rows from (unnest(@shards::smallint[]), unnest(@keys::text[])) as u (shard, key)
where b.channel = @channel and b.shard = u.shard and b.key = u.key and b.reason = 'retry'
  and not exists (select 1 from commitbox.outbox_deferred d where d.channel = b.channel and d.shard = b.shard and d.key = b.key)
returning b.shard, b.key;

-- name: MarkProbes :exec
-- Notes what is about to be published from shards that were taken over from a relay that died: if this one dies too, the
-- next owner finds the suspect. The count is 1 for one of several in a call, 2 for one that is tried alone; id 0 takes
-- the note away. After the fence. Primary key.
update commitbox.outbox_shard s set probe_id = nullif(u.id, 0), probe_count = u.count
from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[]), unnest(@counts::integer[])) as u (shard, id, count)
where s.channel = @channel and s.shard = u.shard;

-- name: MarkClean :exec
-- Ends the probation of shards. After the fence. Primary key.
update commitbox.outbox_shard s set unclean = false, probe_id = null, probe_count = 0
where s.channel = @channel and s.shard = any(@shards::smallint[]);
