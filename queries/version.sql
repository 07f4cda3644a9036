-- name: VersionCreate :one
-- Makes the row of a resource that was at version 0, which is to have none. Nothing back: it has one, or another
-- transaction is making it. Locks: the advisory lock of the resource, tried and never waited for, and the new row. Index:
-- the primary key, for the conflict. Two creators: the second one is refused by the lock, while the first one's row is not
-- committed; without the lock it would wait on the unique index until the first one ends, however long it idles. Once the
-- first one has committed, the conflict says so, without an error that would abort the caller's transaction.
insert into commitbox.resource_version (type, id, version)
select @type::text, @id::text, 1
 where pg_try_advisory_xact_lock(commitbox.resource_version_lock(@type::text, @id::text))
on conflict (type, id) do nothing
returning version;

-- name: VersionAdvance :one
-- Raises the version of a resource if it is the expected one. Nothing back: it is not, or another transaction is
-- changing it. Locks: the row, skipped if it is locked, so that nobody waits for a transaction that idles and two
-- transactions that advance two resources in turn do not deadlock. Index: primary key. Two replicas: one gets the lock; the
-- other finds the row locked, or, after the commit, its version another one, because the condition is evaluated again on
-- the locked row. An update alone would wait for the first one.
with k as materialized (
    select v.type, v.id
      from commitbox.resource_version v
     where v.type = @type::text and v.id = @id::text and v.version = @expected::bigint
       for no key update skip locked
)
update commitbox.resource_version v
   set version = v.version + 1, changed_at = clock_timestamp()
  from k
 where v.type = k.type and v.id = k.id
returning v.version;

-- name: VersionLook :one
-- Reads the version of a resource. Locks: none, so it may have changed when the caller reads the answer; what is advanced
-- repeats the condition. Index: primary key. Sent after an advance that changed nothing, in a statement of its own: under
-- READ COMMITTED only a new statement sees what was committed while the first one ran.
select version from commitbox.resource_version where type = @type::text and id = @id::text;
