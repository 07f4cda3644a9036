-- +goose Up

-- Makes failed messages of a consumer dead that were due longer ago than the policy's abandon_after and that nobody has tried
-- since, the first received first, at most so many; returns how many. Ages count from as_of or from now, whichever is earlier. It says so in
-- last_error and in audit; the new epoch refuses a failure record that is on its way, and dead_retention counts from now.
-- Rows that somebody holds are left. It runs as its owner and reads the policy for itself, so that a role that cleans up
-- needs no right to change a row and can shorten nothing.
-- +goose StatementBegin
create function commitbox.inbox_abandon(consumer text, as_of timestamptz, at_most integer) returns bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    horizon    interval := (select least(p.abandon_after, interval '900 years') from commitbox.inbox_policy_of(inbox_abandon.consumer) p);
    due_before timestamptz := least(statement_timestamp(), inbox_abandon.as_of) - horizon;
    done       bigint;
begin
    update commitbox.inbox i
       set status = 'dead', epoch = i.epoch + 1, next_attempt_at = null, finished_at = clock_timestamp(),
           last_error = left('abandoned: nobody tried it again' || coalesce('; ' || i.last_error, ''), 1000)
     where i.ctid = any (array(
        select f.ctid from commitbox.inbox f
         where f.consumer = inbox_abandon.consumer and f.finished_at is null and f.status = 'failed'
           and f.received_at < due_before and f.next_attempt_at < due_before
         order by f.received_at, f.message_id limit inbox_abandon.at_most
           for no key update skip locked
        ))
       and i.status = 'failed';
    get diagnostics done = row_count;
    if done > 0 then
        insert into commitbox.audit (action, target, reason)
        values ('inbox_abandon', inbox_abandon.consumer, done || ' messages, due for longer than ' || horizon);
    end if;
    return done;
end
$$;
-- +goose StatementEnd

-- Removes what processes left that ended more than an hour ago: lease rows of relays whose channel nobody serves any more (who
-- serves one does it at once), and rows of replicas that followed the policies. An expired lease is never renewed, and a
-- shard whose owner has no row is free and unclean, as after a relay's own look; so no lock on the channel is needed. Rows
-- that somebody holds are left. It runs as its owner, so that a role that cleans up cannot end a living relay's lease.
-- +goose StatementBegin
create function commitbox.forget_gone(as_of timestamptz, at_most integer, out relays bigint, out replicas bigint)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    gone_before timestamptz := least(statement_timestamp(), forget_gone.as_of) - interval '1 hour';
begin
    delete from commitbox.outbox_relay d
     where d.ctid = any (array(
        select r.ctid from commitbox.outbox_relay r where r.lease_until < gone_before limit forget_gone.at_most for update skip locked));
    get diagnostics relays = row_count;
    delete from commitbox.inbox_replica d
     where d.ctid = any (array(
        select r.ctid from commitbox.inbox_replica r where r.seen_at < gone_before limit forget_gone.at_most for update skip locked));
    get diagnostics replicas = row_count;
end
$$;
-- +goose StatementEnd

revoke execute on function commitbox.inbox_abandon(text, timestamptz, integer), commitbox.forget_gone(timestamptz, integer) from public;

-- What a role of a kind needs, and no more. The one list: grant_rights grants it, missing_rights compares with it. Privileges are
-- as GRANT writes them.
--
--   produce  enqueues       relay    runs relays       consume  handles messages, in every mode
--   edit     advances versions of resources            schedule runs jobs       cleanup  cleans up, and reads no content
--   observe  reads all but payloads, headers, results, keys and error texts
--   migrate  owns the schema and everything in it, so it has no list
-- +goose StatementBegin
create function commitbox.rights(kind text) returns table (object_type text, object text, privileges text)
language sql stable as $$
    select 'schema', 'commitbox', 'usage' where kind in ('produce', 'relay', 'consume', 'edit', 'schedule', 'cleanup', 'observe')
    union all
    select r.object_type, 'commitbox.' || r.object, r.privileges from (values
        ('produce', 'sequence', 'outbox_seq', 'usage'),
        ('produce', 'table', 'outbox_message', 'insert'),
        ('produce', 'table', 'outbox_scheduled', 'insert'),
        ('relay', 'sequence', 'outbox_seq', 'usage'),
        ('relay', 'sequence', 'outbox_epoch', 'usage'),
        ('relay', 'table', 'outbox_message', 'select, insert, delete'),
        ('relay', 'table', 'outbox_scheduled', 'select, update, delete'),
        ('relay', 'table', 'outbox_sent', 'insert'),
        ('relay', 'table', 'outbox_channel', 'select, insert, update'),
        ('relay', 'table', 'outbox_shard', 'select, insert, update'),
        ('relay', 'table', 'outbox_relay', 'select, insert, update, delete'),
        ('relay', 'table', 'outbox_blocked', 'select, insert, update, delete'),
        ('relay', 'table', 'outbox_deferred', 'select, insert, update, delete'),
        ('relay', 'table', 'outbox_dead', 'select, insert, delete'),
        ('relay', 'function', 'outbox_sent_days(integer, integer)', 'execute'),
        ('consume', 'table', 'inbox', 'select, insert, update'),
        ('consume', 'table', 'inbox_step', 'select, insert'),
        ('consume', 'table', 'inbox_policies', 'select'),
        ('consume', 'table', 'inbox_replica', 'select, insert, update, delete'),
        ('consume', 'table', 'cache_generation', 'select'),
        ('edit', 'table', 'resource_version', 'select, insert, update'),
        ('schedule', 'table', 'schedule_job', 'select, insert, update'),
        ('schedule', 'table', 'schedule_status', 'select'),
        ('cleanup', 'table', 'inbox', 'select (ctid, consumer, status, lease_until, finished_at), delete, update (trace_id)'),
        ('cleanup', 'table', 'inbox_policies', 'select'),
        ('cleanup', 'table', 'outbox_dead', 'select (ctid, discarded_at), delete, update (last_error)'),
        ('cleanup', 'table', 'outbox_channel', 'select'),
        ('cleanup', 'function', 'outbox_sent_days(integer, integer)', 'execute'),
        ('cleanup', 'function', 'inbox_abandon(text, timestamptz, integer)', 'execute'),
        ('cleanup', 'function', 'forget_gone(timestamptz, integer)', 'execute')
    ) as r (kind, object_type, object, privileges) where r.kind = rights.kind
    union all
    select 'table', 'commitbox.' || quote_ident(c.relname),
           'select (' || string_agg(quote_ident(a.attname), ', ' order by a.attnum) || ')'
      from pg_catalog.pg_class c join pg_catalog.pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
     where kind = 'observe' and c.relnamespace = 'commitbox'::regnamespace and c.relkind in ('r', 'p', 'v') and not c.relispartition
       and a.attname not in ('payload', 'headers', 'result', 'key', 'last_error')
     group by c.relname
$$;
-- +goose StatementEnd

-- The rights of a kind that a role does not have, as the GRANT that would give each: what a program asks when it starts. A
-- last line tells of a role that may not do a work because it, or a role that it is a member of, cleans up.
-- +goose StatementBegin
create function commitbox.missing_rights(kind text, role name default current_user) returns setof text
language sql stable as $$
    select format('grant %s on %s %s to %I', p[1], r.object_type, r.object, missing_rights.role)
      from commitbox.rights(missing_rights.kind) r,
           regexp_matches(r.privileges, '(\w+(?: \([^)]*\))?)', 'g') p
     where not case r.object_type
           when 'schema' then has_schema_privilege(missing_rights.role, 'commitbox'::regnamespace::oid, p[1])
           when 'sequence' then has_sequence_privilege(missing_rights.role, r.object, p[1])
           when 'function' then has_function_privilege(missing_rights.role, r.object, p[1])
           when 'table' then case when p[1] !~ '\(' then has_table_privilege(missing_rights.role, r.object, p[1])
                else (select bool_and(has_column_privilege(missing_rights.role, r.object, btrim(c, ' "'), split_part(p[1], ' ', 1)))
                        from unnest(string_to_array(substring(p[1] from '\((.*)\)'), ',')) c) end
           end
    union all
    select distinct format('revoke the membership of %I in %I: whoever cleans up is kept from changing rows', missing_rights.role, k.rolname)
      from pg_catalog.pg_policy l cross join lateral unnest(l.polroles) m (oid) join pg_catalog.pg_roles k on k.oid = m.oid
     where missing_rights.kind in ('relay', 'consume') and l.polname like 'cleanup\_%' and l.polcmd = 'w'
       and l.polrelid in ('commitbox.inbox'::regclass, 'commitbox.outbox_dead'::regclass)
       and pg_has_role(missing_rights.role, k.oid, 'usage')
       and not (select a.rolsuper or a.rolbypassrls from pg_catalog.pg_roles a where a.rolname = missing_rights.role)
$$;
-- +goose StatementEnd

-- Gives a role that exists the rights of a kind, and may be called again after a migration. The roles are made by whoever runs the server,
-- because they belong to all of its databases; "drop owned by" takes everything back. Called by the owner.
--
-- To clean up is for a role of its own: row security then keeps it from deleting anything but completed and dead inbox rows
-- and discarded messages, and from changing any, whatever it sends. Only then row security is on for these two tables; it
-- costs other roles nothing, because their policy is the constant true, and owners are exempt. But COPY into them, and row_security = off
-- as pg_dump sets it, are for owners from then on.
--
-- To migrate hands the schema and everything in it over to the role.
-- +goose StatementBegin
create function commitbox.grant_rights(kind text, role name) returns void language plpgsql as $$
declare
    line text;
    bad  text;
begin
    if not exists (select 1 from pg_catalog.pg_roles r where r.rolname = grant_rights.role) then
        raise exception 'there is no role %', quote_ident(grant_rights.role) using errcode = 'undefined_object';
    end if;
    if kind = 'migrate' then
        for line in select * from commitbox.ownership(grant_rights.role) loop
            execute line;
        end loop;
        return;
    end if;
    for line in select format('grant %s on %s %s to %I', r.privileges, r.object_type, r.object, grant_rights.role) from commitbox.rights(kind) r loop
        execute line;
    end loop;
    if not found then
        raise exception 'no kind of role is named %: produce, relay, consume, edit, schedule, cleanup, observe or migrate', quote_literal(kind)
            using errcode = 'invalid_parameter_value';
    end if;
    if kind = 'cleanup' then
        perform commitbox.limit_cleanup(grant_rights.role);
    end if;
    select string_agg(m, '; ') into bad from unnest(array['relay', 'consume', 'cleanup']) k, commitbox.missing_rights(k, grant_rights.role) m
     where k = kind;
    if bad is not null then
        raise exception 'role % cannot do this work: %', quote_ident(grant_rights.role), bad using errcode = 'invalid_grant_operation';
    end if;
end
$$;
-- +goose StatementEnd

-- The statements that make a role the owner of the schema and of everything in it.
-- +goose StatementBegin
create function commitbox.ownership(role name) returns setof text language sql stable as $$
    select format('alter schema commitbox owner to %I', ownership.role)
    union all
    select format('alter %s %s owner to %I', case c.relkind when 'S' then 'sequence' when 'v' then 'view' else 'table' end, c.oid::regclass, ownership.role)
      from pg_catalog.pg_class c
     where c.relnamespace = 'commitbox'::regnamespace and c.relkind in ('r', 'p', 'v', 'S')
       and not (c.relkind = 'S' and exists (
            select 1 from pg_catalog.pg_depend d where d.classid = 'pg_class'::regclass and d.objid = c.oid and d.deptype in ('a', 'i')))
    union all
    select format('alter routine %s owner to %I', p.oid::regprocedure, ownership.role)
      from pg_catalog.pg_proc p where p.pronamespace = 'commitbox'::regnamespace
$$;
-- +goose StatementEnd

-- Row security for a role that cleans up. For everybody else one policy that is the constant true, which the planner drops.
-- SELECT … FOR UPDATE asks the policy for updates which rows may be locked; its check, false, lets none be changed.
-- +goose StatementBegin
create function commitbox.limit_cleanup(role name) returns void language plpgsql as $$
declare
    id oid := (select r.oid from pg_catalog.pg_roles r where r.rolname = limit_cleanup.role);
    t  record;
begin
    for t in select * from (values
        ('commitbox.inbox', 'status in (''completed'', ''dead'')'),
        ('commitbox.outbox_dead', 'discarded_at is not null')
    ) as t (name, may_go) loop
        if not exists (select 1 from pg_catalog.pg_policy p where p.polrelid = t.name::regclass and p.polname = 'everybody') then
            execute format('create policy everybody on %s using (true) with check (true)', t.name);
        end if;
        execute format('drop policy if exists cleanup_delete_%s on %s', id, t.name);
        execute format('drop policy if exists cleanup_lock_%s on %s', id, t.name);
        execute format('create policy cleanup_delete_%s on %s as restrictive for delete to %I using (%s)', id, t.name, limit_cleanup.role, t.may_go);
        execute format('create policy cleanup_lock_%s on %s as restrictive for update to %I using (%s) with check (false)',
            id, t.name, limit_cleanup.role, t.may_go);
        execute format('alter table %s enable row level security', t.name);
    end loop;
end
$$;
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
do $$
declare
    p record;
begin
    for p in select l.polname, l.polrelid::regclass as t from pg_catalog.pg_policy l
              where l.polrelid in ('commitbox.inbox'::regclass, 'commitbox.outbox_dead'::regclass) loop
        execute format('drop policy %I on %s', p.polname, p.t);
        execute format('alter table %s disable row level security', p.t);
    end loop;
end
$$;
-- +goose StatementEnd
drop function commitbox.limit_cleanup(name);
drop function commitbox.ownership(name);
drop function commitbox.grant_rights(text, name);
drop function commitbox.missing_rights(text, name);
drop function commitbox.rights(text);
drop function commitbox.forget_gone(timestamptz, integer);
drop function commitbox.inbox_abandon(text, timestamptz, integer);
