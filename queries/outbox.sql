-- name: Enqueue :exec
-- Stores messages in the caller's transaction, in the order given. Locks: RowExclusive on the table only; the relay
-- reads exactly that lock to know who may still commit a lower id, and PostgreSQL takes it before nextval is
-- evaluated. No RETURNING, so that the writer's role needs INSERT and USAGE on the sequence and nothing else. Headers
-- travel as text[], because a jsonb[] argument cannot be told from bytea[] in pgx's exec mode. Two writers never
-- conflict: the sequence makes the key.
insert into commitbox.outbox_message (message_id, channel, key, topic, content_type, headers, payload)
select u.message_id, u.channel, nullif(u.key, ''), u.topic, nullif(u.content_type, ''), u.headers::jsonb, u.payload
from rows from (
    unnest(@message_ids::uuid[]), unnest(@channels::text[]), unnest(@keys::text[]), unnest(@topics::text[]),
    unnest(@content_types::text[]), unnest(@headers::text[]), unnest(@payloads::bytea[])
) with ordinality as u (message_id, channel, key, topic, content_type, headers, payload, position)
order by u.position;

-- name: EnqueueOne :exec
-- The same for one message, which most transactions have: without arrays it takes half of the time.
insert into commitbox.outbox_message (message_id, channel, key, topic, content_type, headers, payload)
values (@message_id::uuid, @channel::text, nullif(@key::text, ''), @topic::text, nullif(@content_type::text, ''), cast(@headers::text as jsonb), @payload::bytea);

-- name: EnqueueInCommitOrder :exec
-- The same, after a transaction-level advisory lock on every key: of two transactions that enqueue for one key, the one
-- that draws its positions first commits first. The locks are taken before any position is drawn, because the insert
-- reads the count of them (a CTE that nothing references would not run), in the order of their hashes, so that two
-- statements cannot deadlock; two Enqueue calls in each of two transactions still can (40P01, retryable). Messages
-- without a key take no lock.
with hashed as materialized (
    select distinct hashtextextended(x.key collate "C", hashtextextended(x.channel collate "C", 'commitbox.outbox_message'::regclass::oid::bigint)) as h
    from rows from (unnest(@channels::text[]), unnest(@keys::text[])) as x (channel, key)
    where x.key <> '' order by h
), locked as materialized (
    select count(pg_advisory_xact_lock(h)) as n from hashed
)
insert into commitbox.outbox_message (message_id, channel, key, topic, content_type, headers, payload)
select u.message_id, u.channel, nullif(u.key, ''), u.topic, nullif(u.content_type, ''), u.headers::jsonb, u.payload
from rows from (
    unnest(@message_ids::uuid[]), unnest(@channels::text[]), unnest(@keys::text[]), unnest(@topics::text[]),
    unnest(@content_types::text[]), unnest(@headers::text[]), unnest(@payloads::bytea[])
) with ordinality as u (message_id, channel, key, topic, content_type, headers, payload, position), locked
order by u.position;

-- name: Schedule :exec
-- Stores messages for later in the caller's transaction. Locks: RowExclusive on the table of scheduled messages. Two writers
-- never conflict: the sequence makes the key.
insert into commitbox.outbox_scheduled (due_at, message_id, channel, key, topic, content_type, headers, payload)
select u.due_at, u.message_id, u.channel, nullif(u.key, ''), u.topic, nullif(u.content_type, ''), u.headers::jsonb, u.payload
from rows from (
    unnest(@due_ats::timestamptz[]), unnest(@message_ids::uuid[]), unnest(@channels::text[]), unnest(@keys::text[]), unnest(@topics::text[]),
    unnest(@content_types::text[]), unnest(@headers::text[]), unnest(@payloads::bytea[])
) with ordinality as u (due_at, message_id, channel, key, topic, content_type, headers, payload, position)
order by u.position;
