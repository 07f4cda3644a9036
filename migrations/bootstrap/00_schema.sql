-- Run only where the schema is missing: IF NOT EXISTS demands CREATE on the database even when there is nothing to do.
create schema if not exists commitbox;
