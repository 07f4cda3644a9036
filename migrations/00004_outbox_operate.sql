-- +goose Up

-- What an operator does to the outbox. Every statement locks the shard's row first and looks in the next one, as the relay
-- does, so it is safe while the owner publishes; where the owner has to look again it gets a new epoch, and reads the
-- shard anew within a second. A message in flight at that moment may still be sent. Everything is written to audit.

-- Makes the channel's rows, so that a key can be parked before any relay has run.
-- +goose StatementBegin
create function commitbox.outbox_register(channel text) returns void language sql as $$
    insert into commitbox.outbox_channel (channel) values ($1) on conflict do nothing;
    insert into commitbox.outbox_shard (channel, shard) select $1, n::smallint from generate_series(0, 63) n order by n on conflict do nothing;
$$;
-- +goose StatementEnd

-- Locks the shard of a key and gives it a new epoch; the owner stays.
-- +goose StatementBegin
create function commitbox.outbox_touch(channel text, shard smallint) returns void language sql as $$
    select 1 from commitbox.outbox_shard s where s.channel = $1 and s.shard = $2 for no key update;
    update commitbox.outbox_shard s set epoch = nextval('commitbox.outbox_epoch') where s.channel = $1 and s.shard = $2;
$$;
-- +goose StatementEnd

-- +goose StatementBegin
create function commitbox.outbox_audit(action text, channel text, what text, reason text) returns void language sql as $$
    insert into commitbox.audit (action, target, reason) values ($1, left($2 || '/' || $3, 250), left($4, 500));
$$;
-- +goose StatementEnd

-- What a filter chose, for audit.
create function commitbox.outbox_chosen(done bigint, topic text, key text, since timestamptz, until timestamptz) returns text language sql stable
    return concat(done, ' messages', ', since ' || since, ', until ' || until, ', topic ' || topic, ', key ' || key);

-- Moves one dead row back, under the lock of its shard. The one that holds its key keeps its place: back to deferred under
-- its old id. Any other goes to the end under a new id, because a confirmed delete of the old id may still be on its way.
-- False: the row was not there any more.
-- +goose StatementBegin
create function commitbox.outbox_revive(at commitbox.outbox_dead) returns boolean language plpgsql as $$
begin
    delete from commitbox.outbox_dead d
     where d.channel = at.channel and d.shard = at.shard and d.id = at.id and d.message_id = at.message_id;
    if not found then
        return false;
    end if;
    update commitbox.outbox_blocked b set reason = 'retry', due_at = clock_timestamp(), dead_id = null
     where b.channel = at.channel and b.shard = at.shard and b.key = at.key and b.dead_id = at.id;
    if found then
        insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, key, topic, content_type, headers, payload, last_error)
        values (at.id, at.created_at, at.message_id, at.shard, at.channel, at.key, at.topic, at.content_type, at.headers, at.payload, at.last_error);
        perform commitbox.outbox_touch(at.channel, at.shard);
    else
        insert into commitbox.outbox_message (created_at, message_id, channel, key, topic, content_type, headers, payload)
        values (at.created_at, at.message_id, at.channel, at.key, at.topic, at.content_type, at.headers, at.payload);
    end if;
    return true;
end
$$;
-- +goose StatementEnd

-- Makes a dead message run again and returns true; false if there is no dead message of that id. A discarded one too.
-- +goose StatementBegin
create function commitbox.outbox_requeue(channel text, message_id uuid, reason text default null) returns boolean
language plpgsql as $$
declare
    at commitbox.outbox_dead;
begin
    select d.* into at from commitbox.outbox_dead d
     where d.message_id = outbox_requeue.message_id and d.channel = outbox_requeue.channel
     order by d.id limit 1;
    if not found then
        return false;
    end if;
    perform 1 from commitbox.outbox_shard s where s.channel = at.channel and s.shard = at.shard for no key update;
    if not commitbox.outbox_revive(at) then
        return false;
    end if;
    perform commitbox.outbox_audit('outbox_requeue', at.channel, at.message_id::text, outbox_requeue.reason);
    return true;
end
$$;
-- +goose StatementEnd
comment on function commitbox.outbox_requeue is
    'true: it waits to be published again. false: no dead message of this channel has this id. It may wait elsewhere, or it was confirmed.';

-- Makes dead messages run again, oldest first, at most so many: all of the channel, or of a topic, or that died within a
-- time. Discarded ones stay. Returns how many; with dry_run it only counts, without the limit. The shards are locked in
-- order; failures in them are recorded only after this has ended, so many are done in several calls. What outbox_revive does
-- to one, this does to all of them in one statement.
-- +goose StatementBegin
create function commitbox.outbox_requeue_many(
    channel text, topic text default null, since timestamptz default null, until timestamptz default null,
    at_most integer default 100, dry_run boolean default false, reason text default null
) returns bigint language plpgsql as $$
#variable_conflict use_column
declare
    locked smallint[];
    heads  smallint[];
    done   bigint;
begin
    if outbox_requeue_many.dry_run then
        select count(*) into done from commitbox.outbox_dead d
         where d.channel = outbox_requeue_many.channel and d.discarded_at is null
           and (outbox_requeue_many.topic is null or d.topic = outbox_requeue_many.topic)
           and (outbox_requeue_many.since is null or d.dead_at >= outbox_requeue_many.since)
           and (outbox_requeue_many.until is null or d.dead_at < outbox_requeue_many.until);
        return done;
    end if;
    select array_agg(l.shard) into locked from (
        select s.shard from commitbox.outbox_shard s
         where s.channel = outbox_requeue_many.channel and exists (select 1 from commitbox.outbox_dead d where d.channel = s.channel and d.shard = s.shard)
         order by s.shard for no key update
    ) l;
    with gone as (
        delete from commitbox.outbox_dead d where d.ctid = any (array(
            select c.ctid from commitbox.outbox_dead c
             where c.channel = outbox_requeue_many.channel and c.discarded_at is null and c.shard = any (locked)
               and (outbox_requeue_many.topic is null or c.topic = outbox_requeue_many.topic)
               and (outbox_requeue_many.since is null or c.dead_at >= outbox_requeue_many.since)
               and (outbox_requeue_many.until is null or c.dead_at < outbox_requeue_many.until)
             order by c.id limit outbox_requeue_many.at_most
        ))
        returning d.*
    ), held as (
        update commitbox.outbox_blocked b set reason = 'retry', due_at = clock_timestamp(), dead_id = null
          from gone g where b.channel = g.channel and b.shard = g.shard and b.key = g.key and b.dead_id = g.id
        returning g.id, g.message_id, g.shard
    ), kept as (
        insert into commitbox.outbox_deferred (id, created_at, message_id, shard, channel, key, topic, content_type, headers, payload, last_error)
        select g.id, g.created_at, g.message_id, g.shard, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload, g.last_error
          from gone g join held h on h.id = g.id and h.message_id = g.message_id
    ), again as (
        insert into commitbox.outbox_message (created_at, message_id, channel, key, topic, content_type, headers, payload)
        select g.created_at, g.message_id, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload
          from gone g where not exists (select 1 from held h where h.id = g.id and h.message_id = g.message_id)
         order by g.id
    )
    select count(*), array(select distinct h.shard from held h) into done, heads from gone;
    perform commitbox.outbox_touch(outbox_requeue_many.channel, h) from unnest(heads) h;
    if done > 0 then
        perform commitbox.outbox_audit('outbox_requeue_many', outbox_requeue_many.channel,
            commitbox.outbox_chosen(done, outbox_requeue_many.topic, null, outbox_requeue_many.since, outbox_requeue_many.until), outbox_requeue_many.reason);
    end if;
    return done;
end
$$;
-- +goose StatementEnd
comment on function commitbox.outbox_requeue_many is
    'How many wait to be published again. 0: none is dead by this choice, discarded ones do not count.';

-- Gives a dead message up for good and returns true; false if there is none of that id, or it is discarded already. The
-- row stays, with who and when. A key that it held goes on.
-- +goose StatementBegin
create function commitbox.outbox_discard(channel text, message_id uuid, reason text default null) returns boolean
language plpgsql as $$
declare
    at commitbox.outbox_dead;
begin
    select d.* into at from commitbox.outbox_dead d
     where d.message_id = outbox_discard.message_id and d.channel = outbox_discard.channel and d.discarded_at is null
     order by d.id limit 1;
    if not found then
        return false;
    end if;
    perform 1 from commitbox.outbox_shard s where s.channel = at.channel and s.shard = at.shard for no key update;
    update commitbox.outbox_dead d set discarded_at = clock_timestamp(), discarded_by = session_user
     where d.channel = at.channel and d.shard = at.shard and d.id = at.id and d.message_id = at.message_id and d.discarded_at is null;
    if not found then
        return false;
    end if;
    update commitbox.outbox_blocked b set reason = 'retry', due_at = clock_timestamp(), dead_id = null
     where b.channel = at.channel and b.shard = at.shard and b.key = at.key and b.dead_id = at.id;
    if found then
        perform commitbox.outbox_touch(at.channel, at.shard);
    end if;
    perform commitbox.outbox_audit('outbox_discard', at.channel, at.message_id::text, outbox_discard.reason);
    return true;
end
$$;
-- +goose StatementEnd
comment on function commitbox.outbox_discard is
    'true: given up for good, the row stays in outbox_dead. false: no dead message of this channel has this id, or it is discarded already.';

-- Changes why a key is blocked, or until when. A key counts as held no longer when the dead message is gone, because a former
-- owner's confirmation of it came late. False: it is not blocked for the reason.
-- +goose StatementBegin
create function commitbox.outbox_reblock(action text, channel text, key text, from_reason text, to_reason text, reason text) returns boolean
language plpgsql as $$
declare
    at smallint := commitbox.outbox_shard_of(outbox_reblock.key);
begin
    perform commitbox.outbox_touch(outbox_reblock.channel, at);
    update commitbox.outbox_blocked b
       set reason = outbox_reblock.to_reason, due_at = case when outbox_reblock.to_reason = 'retry' then clock_timestamp() else 'infinity' end, dead_id = null
     where b.channel = outbox_reblock.channel and b.shard = at and b.key = outbox_reblock.key and (b.reason = outbox_reblock.from_reason
        or b.reason = 'dead' and not exists (select 1 from commitbox.outbox_dead d where d.channel = b.channel and d.shard = b.shard and d.id = b.dead_id and d.key = b.key));
    if not found then
        return false;
    end if;
    perform commitbox.outbox_audit(outbox_reblock.action, outbox_reblock.channel, outbox_reblock.key, outbox_reblock.reason);
    return true;
end
$$;
-- +goose StatementEnd

-- Tries a key that waits for a retry at once. False: no such key waits for one.
create function commitbox.outbox_retry(channel text, key text, reason text default null) returns boolean language sql
    return commitbox.outbox_reblock('outbox_retry', channel, key, 'retry', 'retry', reason);
comment on function commitbox.outbox_retry is
    'true: it is tried again at once. false: the key does not wait for a retry. It flows, or it is parked (outbox_release), or a dead message holds it (outbox_requeue, outbox_discard).';

-- Lets a parked key go on. False: it is not parked.
create function commitbox.outbox_release(channel text, key text, reason text default null) returns boolean language sql
    return commitbox.outbox_reblock('outbox_release', channel, key, 'parked', 'retry', reason);
comment on function commitbox.outbox_release is
    'true: it goes on within a second. false: the key is not parked, outbox_blocked_keys says whether something else holds it.';

-- Stops a key until it is released: its messages are kept in order and not published. A key that a dead message holds
-- stays held by it. False: it is parked or held already.
-- +goose StatementBegin
create function commitbox.outbox_park(channel text, key text, reason text default null) returns boolean language plpgsql as $$
declare
    at smallint := commitbox.outbox_shard_of(outbox_park.key);
begin
    if coalesce(outbox_park.key, '') = '' then
        raise exception 'outbox: a key is needed: messages without a key cannot be parked' using errcode = 'invalid_parameter_value';
    end if;
    perform commitbox.outbox_register(outbox_park.channel);
    perform commitbox.outbox_touch(outbox_park.channel, at);
    insert into commitbox.outbox_blocked as b (channel, shard, key, due_at, reason)
    values (outbox_park.channel, at, outbox_park.key, 'infinity', 'parked')
    on conflict on constraint outbox_blocked_pkey do update set due_at = 'infinity', reason = 'parked' where b.reason = 'retry';
    if not found then
        return false;
    end if;
    perform commitbox.outbox_audit('outbox_park', outbox_park.channel, outbox_park.key, outbox_park.reason);
    return true;
end
$$;
-- +goose StatementEnd
comment on function commitbox.outbox_park is
    'true: nothing of this key is published until outbox_release, but for what is being sent. false: it is parked already, or a dead message holds it.';

-- Takes the first message out of the way of a blocked key and returns its id; null if the key is not blocked or nothing
-- lies behind it. A failed head becomes dead, and the key goes on at once unless it is parked. A key that a dead message
-- holds goes on without it; the message stays dead.
-- +goose StatementBegin
create function commitbox.outbox_skip_head(channel text, key text, reason text default null) returns uuid language plpgsql as $$
declare
    at   smallint := commitbox.outbox_shard_of(outbox_skip_head.key);
    head uuid;
begin
    perform commitbox.outbox_touch(outbox_skip_head.channel, at);
    select d.message_id into head from commitbox.outbox_blocked b
      join commitbox.outbox_dead d on d.channel = b.channel and d.shard = b.shard and d.id = b.dead_id and d.key = b.key
     where b.channel = outbox_skip_head.channel and b.shard = at and b.key = outbox_skip_head.key;
    if head is null then
        with gone as (
            delete from commitbox.outbox_deferred d
             where d.channel = outbox_skip_head.channel and d.shard = at and (d.id, d.message_id) = (
                 select f.id, f.message_id from commitbox.outbox_deferred f
                   join commitbox.outbox_blocked b on b.channel = f.channel and b.shard = f.shard and b.key = f.key and b.reason <> 'dead'
                  where f.channel = outbox_skip_head.channel and f.shard = at and f.key = outbox_skip_head.key order by f.id limit 1)
            returning d.*
        ), dead as (
            insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, key, topic, content_type, headers, payload, last_error)
            select g.id, g.created_at, g.message_id, g.shard, g.attempts, g.channel, g.key, g.topic, g.content_type, g.headers, g.payload,
                   left('skipped by ' || session_user || coalesce('; ' || g.last_error, ''), 500)
              from gone g returning message_id
        )
        select message_id into head from dead;
    end if;
    if head is null then
        return null;
    end if;
    update commitbox.outbox_blocked b set reason = 'retry', due_at = clock_timestamp(), dead_id = null
     where b.channel = outbox_skip_head.channel and b.shard = at and b.key = outbox_skip_head.key and b.reason <> 'parked';
    perform commitbox.outbox_audit('outbox_skip_head', outbox_skip_head.channel, head || ', key ' || outbox_skip_head.key, outbox_skip_head.reason);
    return head;
end
$$;
-- +goose StatementEnd
comment on function commitbox.outbox_skip_head is
    'The id of the message that is out of the way. It is dead, and outbox_requeue brings it back. null: the key is not blocked, or nothing lies behind it.';

-- The blocked keys, with their first message and how many lie behind it. Counting stops at 10 000 for each key.
create view commitbox.outbox_blocked_keys as
select b.channel, b.key, b.reason, b.since, b.due_at, h.message_id as head, h.topic, h.attempts, h.last_error,
       (select count(*) from (select 1 from commitbox.outbox_deferred f
          where f.channel = b.channel and f.shard = b.shard and f.key = b.key limit 10000) f) as waiting
  from commitbox.outbox_blocked b
  left join lateral (
      select d.message_id, d.topic, d.attempts, d.last_error, d.id from commitbox.outbox_dead d
       where d.channel = b.channel and d.shard = b.shard and d.id = b.dead_id and d.key = b.key
      union all
      select d.message_id, d.topic, d.attempts, d.last_error, d.id from commitbox.outbox_deferred d
       where b.reason <> 'dead' and d.channel = b.channel and d.shard = b.shard and d.key = b.key
      order by id limit 1
  ) h on true;

-- The state of a channel in one row. Messages of a shard in hot, deferred and dead are counted up to 10 000; if a shard has more,
-- the count is not exact, but the larger of what the shards looked at would make of 64, and the planner's count of the whole
-- table. Once it cannot be exact, counting stops at 30 000. Scheduled messages and blocked keys are counted up to 64 times as
-- many. So a backlog of millions costs no more, wherever it lies: each count
-- is in the order of an index, because a scan of the table would read all of it. The oldest is looked for among the first of
-- each shard.
-- +goose StatementBegin
create function commitbox.outbox_stats(channel text) returns table (
    pending bigint, pending_exact boolean, oldest_seconds double precision, deferred bigint, blocked_keys bigint, deferred_exact boolean,
    dead bigint, discarded bigint, dead_exact boolean, scheduled bigint, scheduled_exact boolean, relays bigint
) language sql stable as $$
    with recursive hot as (
        select 0 as n, r.rows, r.rows as total, r.rows > 10000 as more
          from (select count(*) as rows from (select 1 from commitbox.outbox_message m where m.channel = $1 and m.shard = 0 order by m.id limit 10001) x) r
        union all
        select w.n + 1, r.rows, w.total + r.rows, w.more or r.rows > 10000
          from hot w cross join lateral (
              select count(*) as rows from (select 1 from commitbox.outbox_message m where m.channel = $1 and m.shard = w.n + 1 order by m.id limit 10001) x
          ) r
         where w.n < 63 and not (w.more and w.total > 30000)
    ), aside as (
        select 0 as n, r.rows, r.rows as total, r.rows > 10000 as more
          from (select count(*) as rows from (select 1 from commitbox.outbox_deferred d where d.channel = $1 and d.shard = 0 order by d.id limit 10001) x) r
        union all
        select w.n + 1, r.rows, w.total + r.rows, w.more or r.rows > 10000
          from aside w cross join lateral (
              select count(*) as rows from (select 1 from commitbox.outbox_deferred d where d.channel = $1 and d.shard = w.n + 1 order by d.id limit 10001) x
          ) r
         where w.n < 63 and not (w.more and w.total > 30000)
    ), buried as (
        select 0 as n, r.rows, r.rows as total, r.rows > 10000 as more, r.discarded
          from (select count(*) as rows, count(x.discarded_at) as discarded
                  from (select d.discarded_at from commitbox.outbox_dead d where d.channel = $1 and d.shard = 0 order by d.id limit 10001) x) r
        union all
        select w.n + 1, r.rows, w.total + r.rows, w.more or r.rows > 10000, w.discarded + r.discarded
          from buried w cross join lateral (
              select count(*) as rows, count(x.discarded_at) as discarded
                from (select d.discarded_at from commitbox.outbox_dead d where d.channel = $1 and d.shard = w.n + 1 order by d.id limit 10001) x
          ) r
         where w.n < 63 and not (w.more and w.total > 30000)
    ), first as (
        select min(least(
                   (select m.created_at from commitbox.outbox_message m where m.channel = $1 and m.shard = n order by m.id limit 1),
                   (select d.created_at from commitbox.outbox_deferred d where d.channel = $1 and d.shard = n order by d.id limit 1))) as oldest
          from generate_series(0, 63) n
    ), counted as (
        select h.rows as pending, h.exact as pending_exact, a.rows as deferred, a.exact and k.rows <= 640000 as deferred_exact,
               k.rows as blocked, b.rows as dead, b.discarded, b.exact as dead_exact, s.rows as scheduled, s.rows <= 640000 as scheduled_exact
          from (select max(w.total) * 64 / count(*) as rows, not bool_or(w.more) as exact from hot w) h,
               (select max(w.total) * 64 / count(*) as rows, not bool_or(w.more) as exact from aside w) a,
               (select (max(w.total) - max(w.discarded)) * 64 / count(*) as rows, max(w.discarded) * 64 / count(*) as discarded, not bool_or(w.more) as exact
                  from buried w) b,
               (select count(*) as rows from (select 1 from commitbox.outbox_blocked k where k.channel = $1 order by k.shard limit 640001) x) k,
               (select count(*) as rows from (select 1 from commitbox.outbox_scheduled s where s.channel = $1 order by s.due_at limit 640001) x) s
    ), planned as (
        select max(c.reltuples::bigint) filter (where c.oid = 'commitbox.outbox_message'::regclass) as hot,
               max(c.reltuples::bigint) filter (where c.oid = 'commitbox.outbox_deferred'::regclass) as deferred,
               max(c.reltuples::bigint) filter (where c.oid = 'commitbox.outbox_dead'::regclass) as dead,
               max(c.reltuples::bigint) filter (where c.oid = 'commitbox.outbox_scheduled'::regclass) as scheduled
          from pg_catalog.pg_class c
         where c.oid in ('commitbox.outbox_message'::regclass, 'commitbox.outbox_deferred'::regclass, 'commitbox.outbox_dead'::regclass,
                         'commitbox.outbox_scheduled'::regclass)
    )
    select case when c.pending_exact then c.pending else greatest(c.pending, p.hot) end::bigint, c.pending_exact,
           coalesce(extract(epoch from clock_timestamp() - f.oldest), 0)::float8,
           case when c.deferred_exact then c.deferred else greatest(c.deferred, p.deferred) end::bigint, c.blocked::bigint, c.deferred_exact,
           case when c.dead_exact then c.dead else greatest(c.dead, p.dead - c.discarded) end::bigint, c.discarded::bigint, c.dead_exact,
           case when c.scheduled_exact then c.scheduled else greatest(c.scheduled, p.scheduled) end::bigint, c.scheduled_exact,
           (select count(*) from commitbox.outbox_relay r where r.channel = $1 and r.lease_until > clock_timestamp())
      from counted c, first f, planned p;
$$;
-- +goose StatementEnd

-- Makes the partitions of today and so many days ahead (UTC), and drops those of days that ended more than keep days ago. The
-- only way in which partitions come and go; it runs as its owner, so that a relay's role needs no rights on the schema. A
-- partition is made aside and attached, which does not wait for readers; a drop is left to the next call if its locks do not
-- come: the first one waits for at most 40 ms, the others hardly, because relays stand behind all of them. Returns how many
-- it made and dropped.
-- +goose StatementBegin
create function commitbox.outbox_sent_days(ahead integer, keep integer, out made integer, out dropped integer)
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    today date := (statement_timestamp() at time zone 'UTC')::date;
    day   date;
    part  text;
    wait  text := current_setting('lock_timeout');
begin
    made := 0;
    dropped := 0;
    if ahead not between 0 and 100 or keep not between 0 and 3650 then
        raise exception 'outbox: ahead must be 0 to 100 and keep 0 to 3650' using errcode = 'invalid_parameter_value';
    end if;
    perform pg_advisory_xact_lock(hashtextextended('outbox_sent_days', 'commitbox.outbox_sent'::regclass::oid::bigint));
    for day in select today + n from generate_series(0, ahead) n loop
        part := 'outbox_sent_' || to_char(day, 'YYYYMMDD');
        if to_regclass('commitbox.' || part) is null then
            execute format('create table commitbox.%I (like commitbox.outbox_sent including all)', part);
            execute format('alter table commitbox.outbox_sent attach partition commitbox.%I for values from (%L) to (%L)',
                part, day::timestamp at time zone 'UTC', (day + 1)::timestamp at time zone 'UTC');
            made := made + 1;
        end if;
    end loop;
    perform set_config('lock_timeout', '40ms', true);
    for part in
        select c.relname from pg_inherits i join pg_class c on c.oid = i.inhrelid
         where i.inhparent = 'commitbox.outbox_sent'::regclass and c.relname < 'outbox_sent_' || to_char(today - keep, 'YYYYMMDD')
         order by c.relname
    loop
        begin
            execute format('drop table commitbox.%I', part);
            dropped := dropped + 1;
        exception when lock_not_available then
            null;
        end;
        perform set_config('lock_timeout', '1ms', true);
    end loop;
    perform set_config('lock_timeout', wait, true);
end
$$;
-- +goose StatementEnd
revoke execute on function commitbox.outbox_sent_days(integer, integer) from public;

-- Puts kept messages of a channel into hot again, under new positions and with their ids, in the order in which they were sent:
-- those sent from since until before until, of a topic, of a key, or all, and after the last one of the call before. At most
-- so many. Returns how many, and the last one; with dry_run it only counts, without the limit. Plain reads of the days in
-- question; nobody changes a kept row.
-- +goose StatementBegin
create function commitbox.outbox_replay(
    channel text, since timestamptz, until timestamptz, topic text default null, key text default null,
    after_at timestamptz default '-infinity', after_id bigint default 0, at_most integer default 100, dry_run boolean default false, reason text default null,
    out done bigint, out last_at timestamptz, out last_id bigint
) language plpgsql as $$
begin
    if outbox_replay.since is null or outbox_replay.until is null then
        raise exception 'outbox: since and until are needed' using errcode = 'invalid_parameter_value';
    end if;
    if outbox_replay.dry_run then
        select count(*) into done from commitbox.outbox_sent s
         where s.channel = outbox_replay.channel and s.sent_at >= outbox_replay.since and s.sent_at < outbox_replay.until
           and (outbox_replay.topic is null or s.topic = outbox_replay.topic) and (outbox_replay.key is null or s.key = outbox_replay.key);
        return;
    end if;
    with chosen as materialized (
        select s.* from commitbox.outbox_sent s
         where s.channel = outbox_replay.channel and s.sent_at >= outbox_replay.since and s.sent_at < outbox_replay.until
           and (outbox_replay.topic is null or s.topic = outbox_replay.topic) and (outbox_replay.key is null or s.key = outbox_replay.key)
           and (s.sent_at, s.id) > (outbox_replay.after_at, outbox_replay.after_id)
         order by s.sent_at, s.id limit outbox_replay.at_most
    ), again as (
        insert into commitbox.outbox_message (created_at, message_id, channel, key, topic, content_type, headers, payload)
        select c.created_at, c.message_id, c.channel, c.key, c.topic, c.content_type, c.headers, c.payload from chosen c order by c.sent_at, c.id
        returning 1
    )
    select (select count(*) from again), c.sent_at, c.id into done, last_at, last_id
      from (select 1) one left join lateral (select h.sent_at, h.id from chosen h order by h.sent_at desc, h.id desc limit 1) c on true;
    if done > 0 then
        perform commitbox.outbox_audit('outbox_replay', outbox_replay.channel,
            commitbox.outbox_chosen(done, outbox_replay.topic, outbox_replay.key, outbox_replay.since, outbox_replay.until), outbox_replay.reason);
    end if;
end
$$;
-- +goose StatementEnd
comment on function commitbox.outbox_replay is
    'done: how many wait to be published again, or with dry_run would. 0: none of this choice is kept, or none is left after the last one, the channel keeps messages for keep_days days.';

-- +goose Down
drop function commitbox.outbox_replay(text, timestamptz, timestamptz, text, text, timestamptz, bigint, integer, boolean, text);
drop function commitbox.outbox_sent_days(integer, integer);
drop function commitbox.outbox_stats(text);
drop view commitbox.outbox_blocked_keys;
drop function commitbox.outbox_skip_head(text, text, text);
drop function commitbox.outbox_park(text, text, text);
drop function commitbox.outbox_release(text, text, text);
drop function commitbox.outbox_retry(text, text, text);
drop function commitbox.outbox_reblock(text, text, text, text, text, text);
drop function commitbox.outbox_discard(text, uuid, text);
drop function commitbox.outbox_requeue_many(text, text, timestamptz, timestamptz, integer, boolean, text);
drop function commitbox.outbox_requeue(text, uuid, text);
drop function commitbox.outbox_revive(commitbox.outbox_dead);
drop function commitbox.outbox_chosen(bigint, text, text, timestamptz, timestamptz);
drop function commitbox.outbox_audit(text, text, text, text);
drop function commitbox.outbox_touch(text, smallint);
drop function commitbox.outbox_register(text);
