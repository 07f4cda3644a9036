-- +goose Up

-- The position of a message. CACHE 1: a session that kept numbers in stock would publish below numbers already passed.
create sequence commitbox.outbox_seq as bigint cache 1;
-- Fencing tokens. One sequence for all shards, so that a shard row made anew never repeats an epoch.
create sequence commitbox.outbox_epoch as bigint cache 1;

-- A destination with its own relays. Rows appear when a relay starts. Joining, reaping and claiming lock this row.
create table commitbox.outbox_channel (
    channel     text collate "C" not null primary key check (octet_length(channel) between 1 and 63),
    dead_policy text collate "C" not null default 'skip' check (dead_policy in ('skip', 'hold')),
    keep_days   integer          not null default 0 check (keep_days between 0 and 3650)
);

-- The shard of a key. It is computed in the database only, so that no client can compute it differently; hashtextextended on
-- collation "C" hashes bytes, and its value needs to be stable only among the rows of one key that wait at the same time
-- (a restore keeps those of the dump; PostgreSQL has not changed the hash since it has it).
create function commitbox.outbox_shard_of(key text) returns smallint
    language sql immutable parallel safe
    return (hashtextextended(key collate "C", 0) & 63)::smallint;

-- What waits to be published: insert and delete only, never updated.
-- vacuum_truncate is off: truncation wants ACCESS EXCLUSIVE and leaves a table of 0 pages that spoils cached plans.
create table commitbox.outbox_message (
    id           bigint           not null default nextval('commitbox.outbox_seq'),
    created_at   timestamptz      not null default clock_timestamp(),
    message_id   uuid             not null,
    shard        smallint         not null,
    channel      text collate "C" not null,
    key          text collate "C",
    topic        text collate "C" not null,
    content_type text,
    headers      jsonb            not null default '{}',
    payload      bytea            not null,
    primary key (channel, shard, id)
) with (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_insert_threshold = -1,
    autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 1000000,
    vacuum_truncate = false, vacuum_index_cleanup = on,
    toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 20000,
    toast.autovacuum_vacuum_insert_threshold = -1, toast.autovacuum_vacuum_cost_delay = 0,
    toast.vacuum_truncate = false, toast.vacuum_index_cleanup = on);

-- The one lease row of a running relay. Only its owner renews it; others delete it once it has expired.
create table commitbox.outbox_relay (
    owner       uuid             not null primary key,
    channel     text collate "C" not null references commitbox.outbox_channel,
    joined_at   timestamptz      not null default clock_timestamp(),
    lease_until timestamptz      not null
) with (fillfactor = 20);

-- Who owns a shard. An owner without a lease row owns nothing. unclean: the former owner did not hand the shard over.
create table commitbox.outbox_shard (
    channel     text collate "C" not null references commitbox.outbox_channel,
    shard       smallint         not null check (shard between 0 and 63),
    owner       uuid,
    epoch       bigint           not null default 0,
    unclean     boolean          not null default false,
    probe_id    bigint,
    probe_count integer          not null default 0,
    primary key (channel, shard)
) with (fillfactor = 50);

-- One row per key that may not flow, because the message at its head failed, or died under policy hold (dead_id says which
-- one), or because it was parked.
create table commitbox.outbox_blocked (
    channel text collate "C" not null,
    shard   smallint         not null,
    key     text collate "C" not null,
    since   timestamptz      not null default clock_timestamp(),
    due_at  timestamptz      not null,
    reason  text collate "C" not null check (reason in ('retry', 'dead', 'parked')),
    dead_id bigint,
    primary key (channel, shard, key),
    foreign key (channel, shard) references commitbox.outbox_shard,
    constraint outbox_blocked_due check ((reason = 'retry') = (due_at < 'infinity')),
    constraint outbox_blocked_held check ((reason = 'dead') = (dead_id is not null))
);
create index outbox_blocked_due_at on commitbox.outbox_blocked (channel, shard, due_at);

-- Failed messages and those behind them. The message's id is part of the key here and among the dead: a server that lost
-- commits draws positions again. The head of a key is its lowest id; a key's due time is its blocked row's,
-- a message without a key has its own. The foreign key makes a follower without a blocked row impossible.
create table commitbox.outbox_deferred (
    id           bigint           not null,
    created_at   timestamptz      not null,
    message_id   uuid             not null,
    shard        smallint         not null,
    attempts     integer          not null default 0 check (attempts >= 0),
    channel      text collate "C" not null,
    key          text collate "C",
    topic        text collate "C" not null,
    content_type text,
    headers      jsonb            not null,
    payload      bytea            not null,
    due_at       timestamptz,
    deferred_at  timestamptz      not null default clock_timestamp(),
    last_error   text check (octet_length(last_error) <= 2048),
    primary key (channel, shard, id, message_id),
    foreign key (channel, shard, key) references commitbox.outbox_blocked,
    constraint outbox_deferred_due check ((key is null) = (due_at is not null) and isfinite(due_at))
);
create index outbox_deferred_key on commitbox.outbox_deferred (channel, shard, key, id) where key is not null;
create index outbox_deferred_due_at on commitbox.outbox_deferred (channel, shard, due_at) where key is null;
create index outbox_deferred_message_id on commitbox.outbox_deferred (message_id);

-- Messages that are given up until a person decides: listed, requeued or discarded. A discarded one stays here, with who
-- and when; it is the only one that cleanup may remove.
create table commitbox.outbox_dead (
    id           bigint           not null,
    created_at   timestamptz      not null,
    message_id   uuid             not null,
    shard        smallint         not null,
    attempts     integer          not null,
    channel      text collate "C" not null,
    key          text collate "C",
    topic        text collate "C" not null,
    content_type text,
    headers      jsonb            not null,
    payload      bytea            not null,
    dead_at      timestamptz      not null default clock_timestamp(),
    last_error   text check (octet_length(last_error) <= 2048),
    discarded_at timestamptz,
    discarded_by text,
    primary key (channel, shard, id, message_id),
    constraint outbox_dead_discarded check ((discarded_at is null) = (discarded_by is null))
);
create index outbox_dead_message_id on commitbox.outbox_dead (message_id);
create index outbox_dead_discarded_at on commitbox.outbox_dead (discarded_at) where discarded_at is not null;
create index outbox_dead_id on commitbox.outbox_dead (channel, id) where discarded_at is null;
create index outbox_dead_topic on commitbox.outbox_dead (channel, topic, dead_at);

-- Messages for later. They take their place in hot, under a position drawn then, when they are due: until then they block
-- nobody of their key. Positions of their own, so that scheduling does not look like news to the relays.
create table commitbox.outbox_scheduled (
    id           bigint           not null generated always as identity,
    due_at       timestamptz      not null check (isfinite(due_at)),
    created_at   timestamptz      not null default clock_timestamp(),
    message_id   uuid             not null,
    channel      text collate "C" not null,
    key          text collate "C",
    topic        text collate "C" not null,
    content_type text,
    headers      jsonb            not null default '{}',
    payload      bytea            not null,
    primary key (channel, due_at, id)
) with (
    autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_insert_threshold = -1,
    autovacuum_vacuum_cost_delay = 0, vacuum_truncate = false);
create index outbox_scheduled_message_id on commitbox.outbox_scheduled (message_id);

-- What a message may be, and its shard: outbox_shard_of its key, or of its id if it has none, whatever the writer says. A trigger,
-- because PostgreSQL keeps its expressions ready in every session, but reads the CHECKs and the generated columns of a table anew
-- from text in every statement that writes. A null where none may be is left to NOT NULL. It runs as the writer, who may insert and
-- nothing else, on his search path: so it calls no function of ours, and says of every other one, and of every operator, that it
-- is PostgreSQL's.
-- +goose StatementBegin
create function commitbox.outbox_check() returns trigger language plpgsql as $$
declare
    broken text := case
        when pg_catalog.octet_length(new.channel) operator(pg_catalog.<) 1 or pg_catalog.octet_length(new.channel) operator(pg_catalog.>) 63 then 'outbox_channel'
        when pg_catalog.octet_length(new.topic) operator(pg_catalog.<) 1 or pg_catalog.octet_length(new.topic) operator(pg_catalog.>) 255 then 'outbox_topic'
        when pg_catalog.octet_length(new.key) operator(pg_catalog.<) 1 or pg_catalog.octet_length(new.key) operator(pg_catalog.>) 512 then 'outbox_key'
        when pg_catalog.octet_length(new.content_type) operator(pg_catalog.<) 1 or pg_catalog.octet_length(new.content_type) operator(pg_catalog.>) 255
            then 'outbox_content_type'
        when pg_catalog.jsonb_typeof(new.headers) operator(pg_catalog.<>) 'object'
            or pg_catalog.jsonb_path_exists(new.headers, 'strict $.* ? (@.type() != "string")') then 'outbox_headers'
        when not pg_catalog.isfinite(new.created_at) then 'outbox_created_at'
        when new.id operator(pg_catalog.<=) 0 then 'outbox_position'
    end;
begin
    if broken is not null then
        raise exception 'message % breaks the rule % of the outbox', new.message_id, broken
            using errcode = 'check_violation', constraint = broken, table = tg_table_name, schema = tg_table_schema,
                  hint = 'The limits are in the function outbox_check.';
    end if;
    if tg_table_name operator(pg_catalog.=) 'outbox_message' then
        new.shard := (pg_catalog.hashtextextended(coalesce(new.key, new.message_id::pg_catalog.text) collate pg_catalog."C", 0) operator(pg_catalog.&) 63)::pg_catalog.int2;
    end if;
    return new;
end $$;
-- +goose StatementEnd
create trigger outbox_check before insert or update on commitbox.outbox_message for each row execute function commitbox.outbox_check();
create trigger outbox_check before insert or update on commitbox.outbox_scheduled for each row execute function commitbox.outbox_check();
-- Also where rows come from another server, as a CHECK would.
alter table commitbox.outbox_message enable always trigger outbox_check;
alter table commitbox.outbox_scheduled enable always trigger outbox_check;

-- Messages that were confirmed, where the channel keeps them: by day, so that forgetting a day is one drop.
create table commitbox.outbox_sent (
    sent_at      timestamptz      not null default clock_timestamp(),
    id           bigint           not null,
    created_at   timestamptz      not null,
    message_id   uuid             not null,
    shard        smallint         not null,
    channel      text collate "C" not null,
    key          text collate "C",
    topic        text collate "C" not null,
    content_type text,
    headers      jsonb            not null,
    payload      bytea            not null,
    primary key (sent_at, id)
) partition by range (sent_at);

-- +goose Down
drop table commitbox.outbox_sent;
drop table commitbox.outbox_scheduled;
drop table commitbox.outbox_dead;
drop table commitbox.outbox_deferred;
drop table commitbox.outbox_blocked;
drop table commitbox.outbox_shard;
drop table commitbox.outbox_relay;
drop table commitbox.outbox_message;
drop function commitbox.outbox_check();
drop function commitbox.outbox_shard_of(text);
drop table commitbox.outbox_channel;
drop sequence commitbox.outbox_epoch;
drop sequence commitbox.outbox_seq;
