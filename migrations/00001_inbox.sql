-- +goose Up

-- One row per (consumer, message): the source of truth of deduplication. Both columns are compared byte by byte
-- (collate "C"), so that no library upgrade can reorder the unique index. There is no identity column, because
-- duplicates would burn its sequence, and no index on a column that every transition changes, so that updates stay HOT.
-- What a row may be is said by inbox_check. autovacuum looks early: the rows are inserted and updated at the rate of the traffic.
-- vacuum_truncate is off: truncation after a large clean-up wants ACCESS EXCLUSIVE, and the space is used again.
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
    primary key (consumer, message_id)
) with (
    fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_insert_scale_factor = 0.05, vacuum_truncate = false);

-- What a row may hold, and what belongs together: a lease while pending, a due time while failed, an end once completed or dead, a
-- result once completed. A trigger, because PostgreSQL keeps its expression ready in every session, but reads the CHECKs of a
-- table anew from text in every statement that writes: as a CHECK it cost 17 µs of each insert, as this 2 to 3. A null where none may
-- be is left to NOT NULL.
-- +goose StatementBegin
create function commitbox.inbox_check() returns trigger language plpgsql as $$
declare
    broken text := case
        when octet_length(new.consumer) not between 1 and 200 then 'inbox_consumer'
        when octet_length(new.message_id) not between 1 and 512 then 'inbox_message_id'
        when new.status not in ('pending', 'completed', 'failed', 'dead') then 'inbox_status'
        when new.attempts < 0 then 'inbox_attempts'
        when new.epoch < 0 then 'inbox_epoch'
        when octet_length(new.fingerprint) not between 1 and 64 then 'inbox_fingerprint'
        when octet_length(new.result) > 1048640 then 'inbox_result'
        when octet_length(new.last_error) > 4096 then 'inbox_last_error'
        when octet_length(new.trace_id) > 64 then 'inbox_trace_id'
        when num_nonnulls(new.lease_until, new.next_attempt_at, new.finished_at) <> 1
            or (new.status = 'pending') <> (new.lease_until is not null)
            or (new.status = 'failed') <> (new.next_attempt_at is not null)
            or (new.lease_until is null) <> (new.lease_token is null)
            or (new.lease_until is not null and new.epoch = 0)
            or (new.result is not null and new.status <> 'completed') then 'inbox_state'
    end;
begin
    if broken is not null then
        raise exception 'message % of consumer % breaks the rule % of the inbox', left(new.message_id, 100), left(new.consumer, 100), broken
            using errcode = 'check_violation', constraint = broken, table = tg_table_name, schema = tg_table_schema,
                  hint = 'The limits and the states that a row may have are in the function inbox_check.';
    end if;
    return new;
end $$;
-- +goose StatementEnd
create trigger inbox_check before insert or update on commitbox.inbox for each row execute function commitbox.inbox_check();
-- Also where rows come from another server, as a CHECK would.
alter table commitbox.inbox enable always trigger inbox_check;

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
drop function commitbox.inbox_check();
