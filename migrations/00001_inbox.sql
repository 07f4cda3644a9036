-- +goose Up

-- Lengths and the values of one column are domains: PostgreSQL keeps a domain's check ready in every session, but reads the
-- CHECKs of a table anew from text in every statement that writes, about 0.5 µs for each name, operator and constant in them.
create domain commitbox.inbox_consumer as text collate "C" check (octet_length(value) between 1 and 200);
create domain commitbox.inbox_message_id as text collate "C" check (octet_length(value) between 1 and 512);
create domain commitbox.inbox_status as text collate "C" check (value in ('pending', 'completed', 'failed', 'dead'));
create domain commitbox.inbox_attempts as integer check (value >= 0);
create domain commitbox.inbox_epoch as bigint check (value >= 0);
create domain commitbox.inbox_fingerprint as bytea check (octet_length(value) between 1 and 64);
create domain commitbox.inbox_result as bytea check (octet_length(value) <= 1048640);
create domain commitbox.inbox_error as text check (octet_length(value) <= 4096);
create domain commitbox.inbox_trace_id as text check (octet_length(value) <= 64);

-- One row per (consumer, message): the source of truth of deduplication. Both columns are compared byte by byte
-- (collate "C"), so that no library upgrade can reorder the unique index. There is no identity column, because
-- duplicates would burn its sequence, and no index on a column that every transition changes, so that updates stay HOT.
-- The one CHECK says what belongs together: a lease while pending, a due time while failed, an end once completed or dead, a
-- result once completed. autovacuum looks early: the rows are inserted and updated at the rate of the traffic. vacuum_truncate
-- is off: truncation after a large clean-up wants ACCESS EXCLUSIVE, and the space is used again.
create table commitbox.inbox (
    consumer        commitbox.inbox_consumer   not null,
    message_id      commitbox.inbox_message_id not null,
    status          commitbox.inbox_status     not null,
    attempts        commitbox.inbox_attempts   not null default 0,
    epoch           commitbox.inbox_epoch      not null default 0,
    lease_token     uuid,
    lease_until     timestamptz,
    received_at     timestamptz                not null default clock_timestamp(),
    finished_at     timestamptz,
    next_attempt_at timestamptz,
    fingerprint     commitbox.inbox_fingerprint,
    result          commitbox.inbox_result,
    payload         bytea,
    headers         jsonb,
    last_error      commitbox.inbox_error,
    trace_id        commitbox.inbox_trace_id,
    primary key (consumer, message_id),
    constraint inbox_state check (
        num_nonnulls(lease_until, next_attempt_at, finished_at) = 1
        and (status = 'pending') = (lease_until is not null)
        and (status = 'failed') = (next_attempt_at is not null)
        and (lease_until is null) = (lease_token is null)
        and (lease_until is null or epoch > 0)
        and (result is null or status = 'completed'))
) with (
    fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05, vacuum_truncate = false);

-- Serves retention: completed and dead rows by the time they ended.
create index inbox_ended_at on commitbox.inbox (consumer, status, finished_at) where finished_at is not null;
-- Serves lists of unfinished work.
create index inbox_open on commitbox.inbox (consumer, received_at, message_id) where finished_at is null;

-- The results of the named steps of leased work. A step goes with its message.
create table commitbox.inbox_step (
    consumer   commitbox.inbox_consumer   not null,
    message_id commitbox.inbox_message_id not null,
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
drop domain commitbox.inbox_trace_id;
drop domain commitbox.inbox_error;
drop domain commitbox.inbox_result;
drop domain commitbox.inbox_fingerprint;
drop domain commitbox.inbox_epoch;
drop domain commitbox.inbox_attempts;
drop domain commitbox.inbox_status;
drop domain commitbox.inbox_message_id;
drop domain commitbox.inbox_consumer;
