-- Lets one migrator in at a time, through a transaction pooler too. One row.
create table if not exists commitbox.migration_lock (
    id          smallint    not null primary key check (id = 1),
    owner       uuid        not null,
    lease_until timestamptz not null
);
