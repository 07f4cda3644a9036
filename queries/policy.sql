-- name: PolicyState :one
-- What a replica learns once a second beside the policies: the server's identity and how far it has written, the cache
-- generation, and the oldest version by which another one still works. Locks: none. Index: none needed, the tables have a
-- row per cache and per replica. On a standby it fails, so that nothing is learned from one.
select s.system_identifier::bigint as system,
       ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint as timeline,
       (pg_current_wal_lsn() - '0/0'::pg_lsn)::bigint as lsn,
       g.generation, clock_timestamp()::timestamptz as now,
       coalesce((select min(r.version) from commitbox.inbox_replica r
                  where r.seen_at > statement_timestamp() - make_interval(secs => @alive_seconds::float8)), 0)::bigint as agreed
  from pg_control_system() s, commitbox.cache_generation g;

-- name: PolicyList :many
-- What holds for each consumer that has a row, and for the others; how long ago a history was left, or -1. Locks: none. Index: none needed, a few rows are read.
-- Two replicas that read around a change see different versions; the stages of a change of mode are there for that.
select p.consumer, p.mode::text as mode, p.store_down::text as store_down, p.version::bigint as version,
       coalesce(p.from_mode, '')::text as from_mode,
       coalesce(extract(epoch from clock_timestamp() - p.table_left), -1)::float8 as table_left,
       coalesce(extract(epoch from clock_timestamp() - p.guard_left), -1)::float8 as guard_left,
       extract(epoch from p.retention)::float8 as retention, extract(epoch from p.dead_retention)::float8 as dead_retention,
       extract(epoch from p.retry_horizon)::float8 as retry_horizon, extract(epoch from p.abandon_after)::float8 as abandon_after,
       coalesce(extract(epoch from p.lease), 0)::float8 as lease, coalesce(p.max_attempts, 0)::integer as max_attempts,
       coalesce(extract(epoch from p.backoff_base), 0)::float8 as backoff_base, coalesce(extract(epoch from p.backoff_max), 0)::float8 as backoff_max
  from commitbox.inbox_policies p
 order by p.consumer;

-- name: PolicyBeat :exec
-- Says by which version this replica works, once it does. Locks: its own row. Index: primary key; the update is HOT. Two
-- replicas have different names.
insert into commitbox.inbox_replica as r (replica, version) values (@replica::text, @version::bigint)
on conflict (replica) do update set version = excluded.version, seen_at = clock_timestamp();

-- name: PolicyForgetReplicas :exec
-- Removes this replica's row when it ends, and those of replicas that were not seen for an hour. Locks: the rows, skipped
-- where somebody else removes them. Index: none needed, there is a row per replica. Two replicas: each row goes once.
delete from commitbox.inbox_replica r
 where r.replica in (select o.replica from commitbox.inbox_replica o
                      where o.replica = @replica::text or o.seen_at < statement_timestamp() - interval '1 hour'
                        for update skip locked);

-- name: PolicySet :one
-- See the function: one change at a time, under an advisory lock.
select commitbox.inbox_policy_set(@consumer::text, cast(@change::text as jsonb), sqlc.narg('reason')::text)::bigint as version;

-- name: PolicyForget :one
-- See the function: one change at a time, under an advisory lock.
select commitbox.inbox_policy_forget(@consumer::text, sqlc.narg('reason')::text)::boolean as forgotten;

-- name: CacheRotate :one
-- See the function. Locks: the one row of cache_generation.
select commitbox.cache_rotate(sqlc.narg('reason')::text)::bigint as generation;
