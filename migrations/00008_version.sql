-- +goose Up

-- The versions of resources that have no version column of their own. A resource without a row is at version 0; its row
-- is made with version 1. Rows stay when the resource goes: if its id came again at version 0, who still holds an old
-- version of it would not be noticed. Both columns of the key are compared byte by byte, and no index holds a column that
-- changes, so that updates stay HOT.
create table commitbox.resource_version (
    type       text collate "C" not null,
    id         text collate "C" not null,
    version    bigint           not null,
    changed_at timestamptz      not null default clock_timestamp(),
    primary key (type, id),
    constraint resource_version_lengths check (octet_length(type) between 1 and 200 and octet_length(id) between 1 and 512),
    constraint resource_version_counts check (version > 0)
) with (fillfactor = 85);

-- The advisory lock under which the row of one resource is made. The hashes are nested, so that ('a', 'bc') and
-- ('ab', 'c') differ; the table's oid is the seed, so that two schemas of one database do not refuse each other.
create function commitbox.resource_version_lock(type text, id text) returns bigint
    language sql immutable parallel safe
    return hashtextextended(id collate "C", hashtextextended(type collate "C", 'commitbox.resource_version'::regclass::oid::bigint));

-- +goose Down
drop function commitbox.resource_version_lock(text, text);
drop table commitbox.resource_version;
