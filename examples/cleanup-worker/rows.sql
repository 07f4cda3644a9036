create table shipment (parcel text not null, label text not null);

-- Of each kind some that are over and some that are not, by the policy that every consumer starts with: 7 days for
-- completed rows, 30 for dead ones, and 7 until a failed row is abandoned.
insert into commitbox.inbox (consumer, message_id, status, attempts, received_at, finished_at, next_attempt_at)
select 'billing', status || age || '-' || n, status, 1, now() - make_interval(days => age),
       case when status <> 'failed' then now() - make_interval(days => age) end, case when status = 'failed' then now() - make_interval(days => age) end
  from (values ('completed', 8, 5000), ('completed', 6, 700), ('dead', 31, 40), ('dead', 29, 30), ('failed', 8, 20), ('failed', 1, 10)) v (status, age, rows),
       generate_series(1, rows) n;

-- A parcel whose process has died in the middle: the lease has expired, and the row holds the payload.
insert into commitbox.inbox (consumer, message_id, status, attempts, epoch, lease_token, lease_until, payload)
values ('shipping', 'parcel-1', 'pending', 1, 1, gen_random_uuid(), now() - interval '1 hour', 'a parcel');

insert into commitbox.outbox_channel (channel) values ('default');
insert into commitbox.outbox_message (created_at, message_id, channel, topic, payload)
select now() - interval '1 year', gen_random_uuid(), 'default', 'orders', 'nobody has relayed it yet' from generate_series(1, 3);
insert into commitbox.outbox_dead (id, created_at, message_id, shard, attempts, channel, topic, headers, payload, discarded_at, discarded_by)
select n, now() - interval '1 year', gen_random_uuid(), 0, 20, 'default', 'orders', '{}', '', case when n > 5 then now() - interval '31 days' end, case when n > 5 then 'operator' end
  from generate_series(1, 8) n;
