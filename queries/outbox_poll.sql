-- name: LastPosition :one
-- The gate: the last position that was drawn, 0 if none was. Reads the sequence outside any snapshot, takes no lock
-- that a writer could wait for, costs one buffer. Unmoved, and nobody open below it: nothing new can exist. To a role
-- without a right on the sequence PostgreSQL 18 answers null, as if nothing had ever been enqueued; currval refuses it.
select coalesce(pg_sequence_last_value('commitbox.outbox_seq'::regclass),
                case when has_sequence_privilege('commitbox.outbox_seq'::regclass, 'usage, select') then 0
                     else currval('commitbox.outbox_seq'::regclass) end)::bigint as last_position;

-- name: OpenWriters :many
-- Who may still commit a row: every transaction that holds a RowExclusive lock on the message table. Has to be read
-- AFTER the position: the lock is taken before nextval is evaluated and dropped after the commit is visible, so whoever
-- drew a position up to it and has not ended is in this answer. A transaction elsewhere that never touches the outbox
-- is not. pid is null for a prepared transaction.
select l.virtualtransaction::text as writer, coalesce(l.pid, 0)::integer as pid
from pg_catalog.pg_locks l
where l.locktype = 'relation' and l.mode = 'RowExclusiveLock'
  and l.database = (select d.oid from pg_catalog.pg_database d where d.datname = current_database())
  and l.relation = 'commitbox.outbox_message'::regclass;

-- name: Poll :many
-- The next messages above each shard's floor. Plain read, one probe of the primary key per shard. Planned for every call
-- (a generic plan made on the empty table took 1 006 ms instead of 0.94). The limits bound the rows, and a payload over
-- payload_max comes as null, so that the answer is bounded by the product: a running sum over the answer costs as much
-- again as the read itself. Who gets such a null asks PollBounded. place is where the row lies; rows are never updated here,
-- so it is the shortest way back to them, see DeleteAt.
select m.place, m.id, m.created_at, m.message_id, m.shard, m.key, m.topic,
       m.content_type, m.headers,
       (case when octet_length(m.payload) <= @payload_max::integer then m.payload end)::bytea as payload
from rows from (unnest(@shards::smallint[]), unnest(@floors::bigint[]), unnest(@limits::integer[])) as s (shard, floor, row_limit)
cross join lateral (
    select o.ctid::tid as place, o.id, o.created_at, o.message_id, o.shard, o.key, o.topic, o.content_type, o.headers, o.payload
    from commitbox.outbox_message o
    where o.channel = @channel and o.shard = s.shard and o.id > s.floor
    order by o.id limit s.row_limit
) m
order by m.shard, m.id;

-- name: PollBounded :many
-- Poll for messages of any size. The running sum bounds the bytes of the whole answer without detoasting, cutting every
-- shard at a prefix: a first row larger than the bound still comes. It is that of the first shard given, so the caller
-- begins with another one each time: large messages of one shard would hide the others. Who gets at least byte_limit bytes
-- cannot tell whether rows were cut, and must treat every shard as not exhausted.
select w.place, w.id, w.created_at, w.message_id, w.shard, coalesce(w.key, '')::text as key, w.topic,
       coalesce(w.content_type, '')::text as content_type, w.headers, w.payload
from (
    select m.place, m.id, m.created_at, m.message_id, m.shard, m.key, m.topic, m.content_type, m.headers, m.payload,
           sum(octet_length(m.payload)) over (order by m.n, s.turn rows between unbounded preceding and 1 preceding) as before
    from rows from (unnest(@shards::smallint[]), unnest(@floors::bigint[]), unnest(@limits::integer[])) with ordinality as s (shard, floor, row_limit, turn)
    cross join lateral (
        select o.ctid::tid as place, o.id, o.created_at, o.message_id, o.shard, o.key, o.topic, o.content_type, o.headers, o.payload,
               row_number() over (order by o.id) as n
        from commitbox.outbox_message o
        where o.channel = @channel and o.shard = s.shard and o.id > s.floor
        order by o.id limit s.row_limit
    ) m
) w
where coalesce(w.before, 0) < @byte_limit::bigint
order by w.shard, w.id;

-- name: BlockedKeys :many
-- The keys of the shards that may not flow. Plain read by primary key prefix; read when a shard is claimed or its epoch
-- changed, kept in memory by the owner afterwards.
select shard, key from commitbox.outbox_blocked where channel = @channel and shard = any(@shards::smallint[]);

-- name: DueDeferred :many
-- Blocked keys whose time has come, oldest first, each with its first messages in order; and due messages without a
-- key. Plain reads by (channel, shard, due_at) and (channel, shard, key, id); statement_timestamp(), because
-- clock_timestamp() is never an index condition. The running sum bounds the bytes, cutting every key at a prefix; a first
-- message larger than the bound still comes. Deferred rows belong to the owner of the shard, so nobody else takes them;
-- what he does with them is fenced.
select y.id, y.created_at, y.message_id, y.shard, coalesce(y.key, '')::text as key, y.topic,
       coalesce(y.content_type, '')::text as content_type, y.headers, y.payload, y.attempts, coalesce(y.last_error, '')::text as last_error
from (
    select x.id, x.created_at, x.message_id, x.shard, x.key, x.topic, x.content_type, x.headers, x.payload, x.attempts, x.last_error,
           sum(octet_length(x.payload)) over (order by x.n, x.shard, x.id rows between unbounded preceding and 1 preceding) as before
    from (
        select d.id, d.created_at, d.message_id, d.shard, d.key, d.topic, d.content_type, d.headers, d.payload, d.attempts, d.last_error, d.n
        from (
            select b.channel, b.shard, b.key from commitbox.outbox_blocked b
            where b.channel = @channel and b.shard = any(@shards::smallint[]) and b.due_at <= statement_timestamp()
            order by b.due_at limit @key_limit::integer
        ) k
        cross join lateral (
            select f.id, f.created_at, f.message_id, f.shard, f.key, f.topic, f.content_type, f.headers, f.payload, f.attempts, f.last_error,
                   row_number() over (order by f.id) as n
            from commitbox.outbox_deferred f
            where f.channel = k.channel and f.shard = k.shard and f.key = k.key
            order by f.id limit @per_key::integer
        ) d
        union all
        (select d.id, d.created_at, d.message_id, d.shard, d.key, d.topic, d.content_type, d.headers, d.payload, d.attempts, d.last_error, 1
         from commitbox.outbox_deferred d
         where d.channel = @channel and d.shard = any(@shards::smallint[]) and d.key is null and d.due_at <= statement_timestamp()
         order by d.due_at limit @key_limit::integer)
    ) x
) y
where coalesce(y.before, 0) < @byte_limit::bigint
order by y.shard, y.id;

-- name: DueDrained :many
-- Due keys with nothing left behind them: what is to be unblocked. Same index as above.
select b.shard, b.key from commitbox.outbox_blocked b
where b.channel = @channel and b.shard = any(@shards::smallint[]) and b.reason = 'retry' and b.due_at <= statement_timestamp()
  and not exists (select 1 from commitbox.outbox_deferred d where d.channel = b.channel and d.shard = b.shard and d.key = b.key)
order by b.due_at limit @key_limit::integer;

-- name: NextDue :one
-- Seconds until the next deferred message of the shards is due, infinity if there is none. The (…, due_at) indexes.
select coalesce(extract(epoch from least(
    (select min(b.due_at) from commitbox.outbox_blocked b where b.channel = @channel and b.shard = any(@shards::smallint[]) and b.reason = 'retry'),
    (select min(d.due_at) from commitbox.outbox_deferred d where d.channel = @channel and d.shard = any(@shards::smallint[]) and d.key is null)
) - clock_timestamp()), 'infinity')::float8 as seconds;

-- name: ReadMessages :many
-- Messages by place and id, from hot or deferred: what a relay that died was publishing. One probe of a primary key for each.
with u as materialized (
    select x.shard, x.id from rows from (unnest(@shards::smallint[]), unnest(@ids::bigint[])) as x (shard, id)
)
select m.id, m.created_at, m.message_id, m.shard, coalesce(m.key, '')::text as key, m.topic,
       coalesce(m.content_type, '')::text as content_type, m.headers, m.payload, 0 as attempts, false as deferred
from u cross join lateral (
    select h.* from commitbox.outbox_message h where h.channel = @channel and h.shard = u.shard and h.id = u.id limit 1
) m
union all
select d.id, d.created_at, d.message_id, d.shard, coalesce(d.key, '')::text, d.topic,
       coalesce(d.content_type, '')::text, d.headers, d.payload, d.attempts, true
from u cross join lateral (
    select h.* from commitbox.outbox_deferred h where h.channel = @channel and h.shard = u.shard and h.id = u.id limit 1
) d;
