-- +goose Up

-- Raised by every change of a policy, under a lock, so that a higher version is a later commit.
create sequence commitbox.inbox_policy_version;

-- How the messages of a consumer are guarded, and for how long that is remembered. The row '*' holds what other rows leave
-- null and what consumers without a row get. Where it is null as well, the program's own setting counts. What follows from
-- a change of the mode is worked out by a trigger, so that a change by hand is as safe as one by function. Rows are not
-- deleted, because they remember which histories must still be read.
create table commitbox.inbox_policy (
    consumer       text collate "C" not null primary key,
    mode           text collate "C",
    store_down     text collate "C", -- closed: refuse while a store that should be asked does not answer; open: go on without it
    retention      interval,         -- of completed rows
    dead_retention interval,
    retry_horizon  interval,         -- for how long a message may still be delivered again
    abandon_after  interval,         -- a failed row that has been due for so long becomes dead
    lease          interval,
    max_attempts   integer,
    backoff_base   interval,
    backoff_max    interval,
    from_mode      text collate "C", -- the mode before the last change of it
    mode_since     timestamptz,
    table_left     timestamptz, -- when rows stopped to be written for every message; null: they are, or need not be read
    guard_left     timestamptz, -- the same for Redis
    version        bigint           not null,
    updated_at     timestamptz      not null,
    updated_by     text             not null,
    constraint inbox_policy_mode check (mode in ('postgres', 'double', 'cache', 'off')),
    constraint inbox_policy_store_down check (store_down in ('closed', 'open')),
    constraint inbox_policy_consumer check (octet_length(consumer) between 1 and 200),
    constraint inbox_policy_times check (
        retention > interval '0' and dead_retention > interval '0' and retry_horizon > interval '0' and abandon_after > interval '0'
        and lease >= interval '1 second' and backoff_base >= interval '0' and backoff_max >= backoff_base),
    constraint inbox_policy_attempts check (max_attempts between 1 and 1000000),
    constraint inbox_policy_retention check (retention >= retry_horizon and dead_retention >= retry_horizon),
    constraint inbox_policy_standard check (consumer <> '*' or (
        mode is not null and store_down is not null and retention is not null and dead_retention is not null
        and retry_horizon is not null and abandon_after is not null))
);

-- Who follows the policies, and the oldest version by which a call is still running there. A process that was not seen
-- for 30 seconds is not waited for.
create table commitbox.inbox_replica (
    replica text collate "C" not null primary key check (octet_length(replica) between 1 and 200),
    version bigint           not null,
    seen_at timestamptz      not null default clock_timestamp()
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02);

-- What copies of rows in a cache are bound to, beside the server's own identity. It is made from the time, so that a
-- database that was restored does not come to a number that was used before.
create table commitbox.cache_generation (
    only_row   boolean     not null default true primary key check (only_row),
    generation bigint      not null default extract(epoch from clock_timestamp()) * 1000000,
    rotated_at timestamptz not null default clock_timestamp()
);
insert into commitbox.cache_generation default values;

-- What holds for each consumer that has a row, and for the others ('*'), and what that is worth. Null: the program's own.
create view commitbox.inbox_policies as
select p.consumer, coalesce(p.mode, d.mode) as mode,
       case coalesce(p.mode, d.mode) when 'postgres' then 'exactly-once effect' when 'double' then 'strong' when 'cache' then 'weak' else 'none' end as level,
       coalesce(p.store_down, d.store_down) as store_down, coalesce(p.retention, d.retention) as retention,
       coalesce(p.dead_retention, d.dead_retention) as dead_retention, coalesce(p.retry_horizon, d.retry_horizon) as retry_horizon,
       coalesce(p.abandon_after, d.abandon_after) as abandon_after, coalesce(p.lease, d.lease) as lease,
       coalesce(p.max_attempts, d.max_attempts) as max_attempts, coalesce(p.backoff_base, d.backoff_base) as backoff_base,
       coalesce(p.backoff_max, d.backoff_max) as backoff_max,
       coalesce(p.from_mode, case when p.mode is null then d.from_mode end) as from_mode,
       greatest(p.mode_since, case when p.mode is null then d.mode_since end) as mode_since,
       greatest(p.table_left, case when p.mode is null then d.table_left end) as table_left,
       greatest(p.guard_left, case when p.mode is null then d.guard_left end) as guard_left,
       greatest(p.version, d.version) as version, p.updated_at, p.updated_by
  from commitbox.inbox_policy p join commitbox.inbox_policy d on d.consumer = '*';

-- What holds for one consumer, whether it has a row or not.
-- +goose StatementBegin
create function commitbox.inbox_policy_of(consumer text) returns setof commitbox.inbox_policies language sql stable as $$
    select p.* from commitbox.inbox_policies p
     where p.consumer in (inbox_policy_of.consumer, '*') order by p.consumer = '*' limit 1
$$;
-- +goose StatementEnd

-- One change at a time, before any row is locked.
-- +goose StatementBegin
create function commitbox.inbox_policy_lock() returns trigger language plpgsql as $$
begin
    perform pg_advisory_xact_lock(hashtextextended('policy', 'commitbox.inbox_policy'::regclass::oid::bigint));
    return null;
end
$$;
-- +goose StatementEnd

-- Stamps a change, and notes which history a change of the mode leaves behind.
-- +goose StatementBegin
create function commitbox.inbox_policy_stamp() returns trigger language plpgsql as $$
declare
    standard commitbox.inbox_policy;
    own_before text;
    before text;
    after text;
begin
    if tg_op = 'DELETE' then
        raise exception 'inbox policy: rows are not deleted; set their columns to null' using errcode = 'restrict_violation';
    elsif tg_op = 'UPDATE' then
        if new.consumer <> old.consumer then
            raise exception 'inbox policy: rows are not renamed' using errcode = 'restrict_violation';
        end if;
        own_before := old.mode;
    end if;
    new.version := nextval('commitbox.inbox_policy_version');
    new.updated_at := clock_timestamp();
    new.updated_by := session_user;
    if new.consumer <> '*' then
        select * into standard from commitbox.inbox_policy p where p.consumer = '*';
        if own_before is null and new.mode is not null then
            new.table_left := greatest(new.table_left, standard.table_left);
            new.guard_left := greatest(new.guard_left, standard.guard_left);
        end if;
    end if;
    before := coalesce(own_before, standard.mode);
    after := coalesce(new.mode, standard.mode);
    if before is distinct from after then
        new.from_mode := before;
        new.mode_since := clock_timestamp();
        new.table_left := case when after in ('postgres', 'double') then null when before in ('postgres', 'double') then clock_timestamp() else new.table_left end;
        new.guard_left := case when after = 'cache' then null when before = 'cache' then clock_timestamp() else new.guard_left end;
    end if;
    return new;
end
$$;
-- +goose StatementEnd

-- What a row inherits counts as well: a message must not be forgotten while it may still be delivered.
-- +goose StatementBegin
create function commitbox.inbox_policy_check() returns trigger language plpgsql as $$
declare
    bad text;
begin
    select p.consumer into bad from commitbox.inbox_policies p
     where p.retention < p.retry_horizon or p.dead_retention < p.retry_horizon or p.backoff_max < p.backoff_base
     order by p.consumer limit 1;
    if found then
        raise exception 'inbox policy of "%": a retention is shorter than the retry horizon, or the largest backoff than the first', bad
            using errcode = 'check_violation', constraint = 'inbox_policy_retention';
    end if;
    return null;
end
$$;
-- +goose StatementEnd

create trigger inbox_policy_lock before insert or update or delete on commitbox.inbox_policy
    for each statement execute function commitbox.inbox_policy_lock();
create trigger inbox_policy_stamp before insert or update or delete on commitbox.inbox_policy
    for each row execute function commitbox.inbox_policy_stamp();
create trigger inbox_policy_check after insert or update on commitbox.inbox_policy
    for each statement execute function commitbox.inbox_policy_check();

insert into commitbox.inbox_policy (consumer, mode, store_down, retention, dead_retention, retry_horizon, abandon_after, version, updated_at, updated_by)
values ('*', 'postgres', 'closed', interval '7 days', interval '30 days', interval '1 day', interval '7 days', 0, now(), '');

-- Changes a policy and returns its new version. change holds the columns that change, such as
-- '{"mode": "double", "retention": "30 days"}'; null inherits the column from '*' again. Every replica follows within
-- two seconds.
-- +goose StatementBegin
create function commitbox.inbox_policy_set(consumer text, change jsonb, reason text default null) returns bigint
language plpgsql as $$
declare
    wrong text;
    p commitbox.inbox_policy;
begin
    select string_agg(k, ', ') into wrong from jsonb_object_keys(inbox_policy_set.change) k
     where k not in ('mode', 'store_down', 'retention', 'dead_retention', 'retry_horizon', 'abandon_after', 'lease', 'max_attempts', 'backoff_base', 'backoff_max');
    if wrong is not null then
        raise exception 'inbox policy: unknown columns: %', wrong using errcode = 'invalid_parameter_value';
    end if;
    perform pg_advisory_xact_lock(hashtextextended('policy', 'commitbox.inbox_policy'::regclass::oid::bigint));
    select * into p from commitbox.inbox_policy i where i.consumer = inbox_policy_set.consumer;
    p.consumer := inbox_policy_set.consumer;
    p := jsonb_populate_record(p, inbox_policy_set.change);
    update commitbox.inbox_policy i
       set mode = p.mode, store_down = p.store_down, retention = p.retention, dead_retention = p.dead_retention,
           retry_horizon = p.retry_horizon, abandon_after = p.abandon_after, lease = p.lease, max_attempts = p.max_attempts,
           backoff_base = p.backoff_base, backoff_max = p.backoff_max
     where i.consumer = p.consumer
    returning i.version into p.version;
    if not found then
        insert into commitbox.inbox_policy as i (consumer, mode, store_down, retention, dead_retention, retry_horizon, abandon_after,
            lease, max_attempts, backoff_base, backoff_max)
        values (p.consumer, p.mode, p.store_down, p.retention, p.dead_retention, p.retry_horizon, p.abandon_after,
            p.lease, p.max_attempts, p.backoff_base, p.backoff_max)
        returning i.version into p.version;
    end if;
    insert into commitbox.audit (action, target, reason)
    values ('inbox_policy_set', left(p.consumer || ' ' || inbox_policy_set.change::text, 255), inbox_policy_set.reason);
    return p.version;
end
$$;
-- +goose StatementEnd
comment on function commitbox.inbox_policy_set is
    'The version of the policy. inbox_policies shows what holds, every replica follows within two seconds.';

-- Ends a change of the mode at once: the history of the mode that was left is not read any more, and what it alone knows
-- of may run again. Returns whether there was one to forget. A consumer that inherits its mode is forgotten with '*'.
-- +goose StatementBegin
create function commitbox.inbox_policy_forget(consumer text, reason text default null) returns boolean
language plpgsql as $$
begin
    update commitbox.inbox_policy i set table_left = null, guard_left = null
     where i.consumer = inbox_policy_forget.consumer and (i.table_left is not null or i.guard_left is not null);
    if not found then
        return false;
    end if;
    insert into commitbox.audit (action, target, reason)
    values ('inbox_policy_forget', inbox_policy_forget.consumer, inbox_policy_forget.reason);
    return true;
end
$$;
-- +goose StatementEnd
comment on function commitbox.inbox_policy_forget is
    'true: the history of the mode that was left is not read any more. false: none is being read for this consumer, one that inherits its mode is forgotten as *.';

-- Makes every cached copy of a row a miss. Part of every restore: the cache may hold copies of rows that the restored
-- database does not have. Returns the new generation; every replica follows within two seconds.
-- +goose StatementBegin
create function commitbox.cache_rotate(reason text default null) returns bigint
language plpgsql as $$
declare
    now_at bigint;
begin
    update commitbox.cache_generation g
       set generation = greatest(g.generation + 1, extract(epoch from clock_timestamp()) * 1000000), rotated_at = clock_timestamp()
    returning g.generation into now_at;
    insert into commitbox.audit (action, target, reason) values ('cache_rotate', now_at::text, cache_rotate.reason);
    return now_at;
end
$$;
-- +goose StatementEnd
comment on function commitbox.cache_rotate is
    'The new generation: every copy in Redis is a miss, on every replica within two seconds.';

-- +goose Down
drop function commitbox.cache_rotate(text);
drop function commitbox.inbox_policy_forget(text, text);
drop function commitbox.inbox_policy_set(text, jsonb, text);
drop function commitbox.inbox_policy_of(text);
drop view commitbox.inbox_policies;
drop table commitbox.inbox_policy;
drop function commitbox.inbox_policy_check();
drop function commitbox.inbox_policy_stamp();
drop function commitbox.inbox_policy_lock();
drop table commitbox.cache_generation;
drop table commitbox.inbox_replica;
drop sequence commitbox.inbox_policy_version;
