-- name: MigrationLock :execrows
-- Takes the lock of the migrators, or takes over an expired one: one row, found by its primary key. ON CONFLICT
-- re-checks the lease on the row's newest version, so of several migrators that find it expired one gets it. No
-- session state: it works through a transaction pooler, where session advisory locks leak.
insert into commitbox.migration_lock as l (id, owner, lease_until)
values (1, @owner::uuid, clock_timestamp() + make_interval(secs => @lease_seconds::float8))
on conflict (id) do update set owner = excluded.owner, lease_until = excluded.lease_until
where l.lease_until < clock_timestamp();

-- name: MigrationLockRenew :execrows
-- Prolongs the lease of the migrators' lock: primary key, row lock of one statement. 0 rows: it was lost.
update commitbox.migration_lock set lease_until = clock_timestamp() + make_interval(secs => @lease_seconds::float8)
where id = 1 and owner = @owner::uuid;

-- name: MigrationUnlock :exec
-- Gives the migrators' lock back: primary key; the owner guard leaves a successor's lock alone.
delete from commitbox.migration_lock where id = 1 and owner = @owner::uuid;

-- name: BootstrapLock :exec
-- Serialises what runs before there is a lock table: a transaction-level advisory lock, so that the end of the short
-- transaction drops it, whatever happens. Needed because IF NOT EXISTS loses catalogue races with 23505.
select pg_advisory_xact_lock(hashtextextended('commitbox', 0));

-- name: SchemaExists :one
-- Whether our schema exists. Takes no lock, reads the catalogue.
select (to_regnamespace('commitbox') is not null)::boolean as found;

-- name: RelationExists :one
-- Whether a relation of our schema exists. Takes no lock, reads the catalogue. The name is a quoted identifier.
select (to_regclass(@name::text) is not null)::boolean as found;
