-- +goose Up

-- One row per (consumer, message): the source of truth of deduplication. Both columns are compared byte by byte
-- (collate "C"), so that no library upgrade can reorder the unique index. There is no identity column, because
-- duplicates would burn its sequence, and no index on a column that every transition changes, so that updates stay HOT.
-- autovacuum looks early: the rows are inserted and updated at the rate of the traffic.
create table commitbox.inbox (
    consumer        text collate "C" not null,
    message_id      text collate "C" not null,
    status          text collate "C" not null,
    attempts        integer          not null default 0,
    epoch           bigint           not null default 0,
    lease_token     uuid,
    lease_until     timestamptz,
    received_at     timestamptz      not null default clock_timestamp(),
    finished_at     timestamptz,
    next_attempt_at timestamptz,
    fingerprint     bytea,
    result          bytea,
    payload         bytea,
    headers         jsonb,
    last_error      text,
    trace_id        text,
    primary key (consumer, message_id),
    constraint inbox_status check (status in ('pending', 'completed', 'failed', 'dead')),
    constraint inbox_lengths check (
        octet_length(consumer) between 1 and 200
        and octet_length(message_id) between 1 and 512
        and octet_length(fingerprint) between 1 and 64
        and octet_length(result) <= 1048640
        and octet_length(last_error) <= 4096
        and octet_length(trace_id) <= 64),
    constraint inbox_counts check (attempts >= 0 and epoch >= 0 and (status <> 'pending' or (epoch > 0 and attempts > 0))),
    constraint inbox_leased check ((status = 'pending') = (lease_until is not null) and (status = 'pending') = (lease_token is not null)),
    constraint inbox_ended check ((status in ('completed', 'dead')) = (finished_at is not null)),
    constraint inbox_due check ((status = 'failed') = (next_attempt_at is not null)),
    constraint inbox_answer check (status = 'completed' or result is null)
) with (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05);

-- Serves retention: completed and dead rows by the time they ended.
create index inbox_ended_at on commitbox.inbox (consumer, status, finished_at) where finished_at is not null;
-- Serves lists of unfinished work.
create index inbox_open on commitbox.inbox (consumer, received_at, message_id) where finished_at is null;

-- The results of the named steps of leased work. A step goes with its message.
create table commitbox.inbox_step (
    consumer   text collate "C" not null,
    message_id text collate "C" not null,
    name       text collate "C" not null check (octet_length(name) between 1 and 200),
    epoch      bigint           not null,
    result     bytea,
    done_at    timestamptz      not null default clock_timestamp(),
    primary key (consumer, message_id, name),
    foreign key (consumer, message_id) references commitbox.inbox on delete cascade
);

-- The advisory lock of one (consumer, message). Every claim takes it, whatever its mode. The hashes are nested, so
-- that ('a', 'bc') and ('ab', 'c') differ; the table's oid is the seed, so that two schemas of one database do not
-- refuse each other. Being one expression, it is inlined by the planner.
create function commitbox.inbox_lock(consumer text, message_id text) returns bigint
    language sql immutable parallel safe
    return hashtextextended(message_id collate "C", hashtextextended(consumer collate "C", 'commitbox.inbox'::regclass::oid::bigint));

-- How long a message waits after its n-th failed attempt: base seconds, doubled each time up to max, times a random
-- factor from 0.75 to 1.25, so that messages that failed together do not come back together.
create function commitbox.inbox_backoff(attempts integer, base double precision, max double precision) returns interval
    language sql volatile parallel safe
    return interval '1 second' * least(max, base * power(2, least(attempts, 30) - 1)) * (0.75 + random() / 2);

-- +goose Down
drop function commitbox.inbox_backoff(integer, double precision, double precision);
drop function commitbox.inbox_lock(text, text);
drop table commitbox.inbox_step;
drop table commitbox.inbox;
