-- +goose Up

-- Who changed what by hand. Written in the transaction of the change.
create table commitbox.audit (
    id     bigint      not null generated always as identity primary key,
    at     timestamptz not null default clock_timestamp(),
    who    text        not null default session_user,
    action text        not null check (octet_length(action) between 1 and 63),
    target text        not null check (octet_length(target) between 1 and 1024),
    reason text        check (octet_length(reason) <= 2048)
);
create index audit_at on commitbox.audit (at);

-- Enqueues one message in the current transaction, for clients in any language. Returns its message id. A null or empty key
-- means no order; a null message id is made here; with deliver_at it waits until then. Lengths are checked by the table. The
-- limits of the payload and of header names and values, in bytes, are those of the Go client; a caller may raise them.
-- +goose StatementBegin
create function commitbox.outbox_enqueue(
    topic text, payload bytea, key text default null, headers jsonb default '{}', channel text default 'default',
    content_type text default null, message_id uuid default null, deliver_at timestamptz default null,
    payload_max integer default 1048576, headers_max integer default 65536
) returns uuid language plpgsql as $$
declare
    id           uuid := coalesce(outbox_enqueue.message_id, gen_random_uuid());
    headers_size bigint;
begin
    if exists (select 1 from jsonb_each(outbox_enqueue.headers) h where jsonb_typeof(h.value) <> 'string') then
        raise exception 'outbox: header values must be strings' using errcode = 'invalid_parameter_value';
    end if;
    if octet_length(outbox_enqueue.payload) > outbox_enqueue.payload_max then
        raise exception 'outbox: payload is too long: % bytes, the limit is %', octet_length(outbox_enqueue.payload), outbox_enqueue.payload_max
            using errcode = 'invalid_parameter_value', hint = 'payload_max raises the limit.';
    end if;
    select sum(octet_length(h.key) + octet_length(h.value)) into headers_size from jsonb_each_text(outbox_enqueue.headers) h;
    if headers_size > outbox_enqueue.headers_max then
        raise exception 'outbox: headers are too long: % bytes, the limit is %', headers_size, outbox_enqueue.headers_max
            using errcode = 'invalid_parameter_value', hint = 'headers_max raises the limit.';
    end if;
    if outbox_enqueue.deliver_at is not null then
        insert into commitbox.outbox_scheduled (due_at, message_id, channel, key, topic, content_type, headers, payload)
        values (outbox_enqueue.deliver_at, id, outbox_enqueue.channel, nullif(outbox_enqueue.key, ''), outbox_enqueue.topic,
                outbox_enqueue.content_type, outbox_enqueue.headers, outbox_enqueue.payload);
        return id;
    end if;
    insert into commitbox.outbox_message (message_id, channel, key, topic, content_type, headers, payload)
    values (id, outbox_enqueue.channel, nullif(outbox_enqueue.key, ''), outbox_enqueue.topic, outbox_enqueue.content_type,
            outbox_enqueue.headers, outbox_enqueue.payload);
    return id;
end
$$;
-- +goose StatementEnd

-- The short name of outbox_enqueue.
create function commitbox.enqueue(
    topic text, payload bytea, key text default null, headers jsonb default '{}', channel text default 'default',
    content_type text default null, message_id uuid default null, deliver_at timestamptz default null,
    payload_max integer default 1048576, headers_max integer default 65536
) returns uuid language sql
    return commitbox.outbox_enqueue(topic, payload, key, headers, channel, content_type, message_id, deliver_at, payload_max, headers_max);

-- Makes a failed or dead message runnable: attempts 0, due now, new epoch (a failure record that is on its way is
-- refused by it). Returns what has to happen next: 'runnable', or 'needs redelivery' when the row holds no payload and
-- the message must come from the broker again; null if there is no failed or dead row of that id. Takes the message's
-- advisory lock first, so that a delivery hears "in progress" until this transaction ends, and waits for a running one:
-- set lock_timeout.
-- +goose StatementBegin
create function commitbox.inbox_requeue(consumer text, message_id text, reason text default null) returns text
language plpgsql as $$
declare
    has_payload boolean;
begin
    perform pg_advisory_xact_lock(commitbox.inbox_lock(inbox_requeue.consumer, inbox_requeue.message_id));
    update commitbox.inbox i
       set status = 'failed', attempts = 0, epoch = i.epoch + 1, finished_at = null, next_attempt_at = clock_timestamp()
     where i.consumer = inbox_requeue.consumer and i.message_id = inbox_requeue.message_id and i.status in ('failed', 'dead')
    returning i.payload is not null into has_payload;
    if not found then
        return null;
    end if;
    insert into commitbox.audit (action, target, reason)
    values ('inbox_requeue', inbox_requeue.consumer || '/' || inbox_requeue.message_id, inbox_requeue.reason);
    return case when has_payload then 'runnable' else 'needs redelivery' end;
end
$$;
-- +goose StatementEnd
comment on function commitbox.inbox_requeue is
    'runnable: whoever resumes failed messages runs it again. needs redelivery: the row has no payload, so the broker has to deliver it. null: no failed or dead row has this id, look with inbox_get.';

-- Gives a failed or dead message, or one whose lease has expired, up: it stays as a dead row, because without a row the
-- next delivery would run it. Returns whether there was such a row. The new epoch refuses whatever its last holder still
-- sends. Takes the message's advisory lock first, as inbox_requeue does: set lock_timeout.
-- +goose StatementBegin
create function commitbox.inbox_discard(consumer text, message_id text, reason text default null) returns boolean
language plpgsql as $$
begin
    perform pg_advisory_xact_lock(commitbox.inbox_lock(inbox_discard.consumer, inbox_discard.message_id));
    update commitbox.inbox i
       set status = 'dead', epoch = i.epoch + 1, lease_token = null, lease_until = null, next_attempt_at = null, finished_at = clock_timestamp(),
           last_error = left('discarded by ' || session_user || coalesce(': ' || inbox_discard.reason, ''), 1000)
     where i.consumer = inbox_discard.consumer and i.message_id = inbox_discard.message_id
       and (i.status in ('failed', 'dead') or (i.status = 'pending' and i.lease_until <= clock_timestamp()));
    if not found then
        return false;
    end if;
    insert into commitbox.audit (action, target, reason)
    values ('inbox_discard', inbox_discard.consumer || '/' || inbox_discard.message_id, inbox_discard.reason);
    return true;
end
$$;
-- +goose StatementEnd
comment on function commitbox.inbox_discard is
    'true: given up, the row stays as dead. false: there is no such row, or it is completed, or its lease has not ended, look with inbox_get.';

-- Marks a message as completed without running anything, in the current transaction. Returns 'completed', 'already'
-- where it was, or 'held' where another transaction or lease has it. The result is stored as it is: null, or a codec byte
-- (1: JSON, 2: bytes) and what follows it. Waits for nobody: the advisory lock is tried and a locked row is skipped.
-- +goose StatementBegin
create function commitbox.inbox_mark_completed(consumer text, message_id text, result bytea default null, reason text default null) returns text
language plpgsql as $$
declare
    mine boolean := pg_try_advisory_xact_lock(commitbox.inbox_lock(inbox_mark_completed.consumer, inbox_mark_completed.message_id));
begin
    if mine then
        insert into commitbox.inbox (consumer, message_id, status, attempts, result, finished_at)
        values (inbox_mark_completed.consumer, inbox_mark_completed.message_id, 'completed', 0, inbox_mark_completed.result, clock_timestamp())
        on conflict on constraint inbox_pkey do nothing;
        if not found then
            with k as materialized (
                select i.consumer as c, i.message_id as m from commitbox.inbox i
                 where i.consumer = inbox_mark_completed.consumer and i.message_id = inbox_mark_completed.message_id
                   and (i.status in ('failed', 'dead') or (i.status = 'pending' and i.lease_until <= clock_timestamp()))
                   for no key update skip locked
            )
            update commitbox.inbox i
               set status = 'completed', epoch = i.epoch + 1, result = inbox_mark_completed.result, finished_at = clock_timestamp(),
                   lease_token = null, lease_until = null, next_attempt_at = null, last_error = null, payload = null, headers = null
              from k where i.consumer = k.c and i.message_id = k.m;
        end if;
        if found then
            insert into commitbox.audit (action, target, reason)
            values ('inbox_mark_completed', inbox_mark_completed.consumer || '/' || inbox_mark_completed.message_id, inbox_mark_completed.reason);
            return 'completed';
        end if;
    end if;
    perform 1 from commitbox.inbox i
      where i.consumer = inbox_mark_completed.consumer and i.message_id = inbox_mark_completed.message_id and i.status = 'completed';
    return case when found then 'already' else 'held' end;
end
$$;
-- +goose StatementEnd
comment on function commitbox.inbox_mark_completed is
    'completed: from now on it counts as done, a row is made if there was none. already: it was completed, nothing changed. held: it is being worked on, try again later.';

-- One message as an operator sees it; no row: there is none. A plain read by primary key.
-- +goose StatementBegin
create function commitbox.inbox_get(consumer text, message_id text) returns table (
    status text, attempts integer, epoch bigint, received_at timestamptz, finished_at timestamptz, due_at timestamptz,
    last_error text, trace_id text, payload bytea, headers jsonb, result bytea
) language sql stable as $$
    select i.status, i.attempts, i.epoch, i.received_at, i.finished_at, coalesce(i.next_attempt_at, i.lease_until),
           i.last_error, i.trace_id, i.payload, i.headers, i.result
      from commitbox.inbox i where i.consumer = $1 and i.message_id = $2;
$$;
-- +goose StatementEnd

-- A page of a consumer's messages of one status without their payloads, the oldest first, behind the cursor of the last
-- one of the page before: by the time of receipt if they are pending or failed, else by their end. Older: at least so old
-- by that time. Plain reads: inbox_open, as a range without a sort, or inbox_ended_at, where those of one instant are
-- sorted. Planned for each call: a plan that was made for an empty table would stay.
-- +goose StatementBegin
create function commitbox.inbox_list(
    consumer text, status text, older interval default '0', after_at timestamptz default '-infinity', after_id text default '', page integer default 100
) returns table (
    message_id text, attempts integer, received_at timestamptz, finished_at timestamptz, due_at timestamptz, last_error text, payload_kept boolean
) language plpgsql stable set plan_cache_mode = force_custom_plan as $$
#variable_conflict use_column
begin
    if inbox_list.status in ('pending', 'failed') then
        return query
        select i.message_id::text, i.attempts::integer, i.received_at, i.finished_at, coalesce(i.next_attempt_at, i.lease_until), i.last_error::text, i.payload is not null
          from commitbox.inbox i
         where i.consumer = inbox_list.consumer and i.finished_at is null and i.status = inbox_list.status
           and i.received_at <= statement_timestamp() - inbox_list.older
           and (i.received_at, i.message_id) > (inbox_list.after_at, inbox_list.after_id)
         order by i.received_at, i.message_id limit inbox_list.page;
    else
        return query
        select i.message_id::text, i.attempts::integer, i.received_at, i.finished_at, null::timestamptz, i.last_error::text, i.payload is not null
          from commitbox.inbox i
         where i.consumer = inbox_list.consumer and i.finished_at is not null and i.status = inbox_list.status
           and i.finished_at <= statement_timestamp() - inbox_list.older
           and (i.finished_at, i.message_id) > (inbox_list.after_at, inbox_list.after_id)
         order by i.finished_at, i.message_id limit inbox_list.page;
    end if;
end
$$;
-- +goose StatementEnd

-- What of a consumer is not completed, and how many seconds ago the oldest message arrived that is neither completed nor
-- dead. Expired ones are pending. Plain reads: inbox_open and the dead part of inbox_ended_at; completed rows, which are
-- most, are not read and not counted.
-- +goose StatementBegin
create function commitbox.inbox_stats(consumer text) returns table (
    pending bigint, expired bigint, failed bigint, dead bigint, oldest_seconds double precision
) language sql stable as $$
    select o.pending, o.expired, o.failed, d.dead, coalesce(extract(epoch from statement_timestamp() - o.oldest), 0)::float8
      from (select count(*) filter (where i.status = 'pending') as pending,
                   count(*) filter (where i.status = 'pending' and i.lease_until < statement_timestamp()) as expired,
                   count(*) filter (where i.status = 'failed') as failed, min(i.received_at) as oldest
              from commitbox.inbox i where i.consumer = $1 and i.finished_at is null) o,
           (select count(*) as dead
              from commitbox.inbox i where i.consumer = $1 and i.finished_at is not null and i.status = 'dead') d;
$$;
-- +goose StatementEnd

-- +goose Down
drop function commitbox.inbox_stats(text);
drop function commitbox.inbox_list(text, text, interval, timestamptz, text, integer);
drop function commitbox.inbox_get(text, text);
drop function commitbox.inbox_mark_completed(text, text, bytea, text);
drop function commitbox.inbox_discard(text, text, text);
drop function commitbox.inbox_requeue(text, text, text);
drop function commitbox.enqueue(text, bytea, text, jsonb, text, text, uuid, timestamptz, integer, integer);
drop function commitbox.outbox_enqueue(text, bytea, text, jsonb, text, text, uuid, timestamptz, integer, integer);
drop table commitbox.audit;
